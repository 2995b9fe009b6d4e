-- All of a pool, for people to look at: its cost grows with the pool. ARGV: waiter_ttl_ms.
-- Returns the server's time; mean_ms and served ('' where unknown); then the nodes and the leases as flat lists, and the
-- wishes of those who wait, in the queue's order.
local now = now_ms()
expire(now)
hand_over(now, tonumber(ARGV[1]))
local facts = redis.call('HMGET', POOL, 'mean_ms', 'served')
for index = 1, 2 do
  facts[index] = facts[index] or ''
end
local wishes = {}
for _, nonce in ipairs(redis.call('ZRANGE', QUEUE, 0, -1)) do
  table.insert(wishes, redis.call('HGET', WISHES, nonce))
end
return { now, facts, redis.call('HGETALL', NODES), redis.call('HGETALL', LEASES), wishes }
