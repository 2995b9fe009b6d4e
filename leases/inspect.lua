-- All of a pool, for people to look at: its cost grows with the pool. ARGV: waiter_ttl_ms.
-- Returns the server's time; epoch, mean_ms and served ('' where unknown); then as flat lists the nodes, the leases,
-- the queue, and the wishes of those who wait.
local now = now_ms()
expire(now)
hand_over(now, tonumber(ARGV[1]))
local facts = redis.call('HMGET', POOL, 'epoch', 'mean_ms', 'served')
for index = 1, 3 do
  facts[index] = facts[index] or ''
end
local queue = redis.call('ZRANGE', QUEUE, 0, -1)
local wishes = {}
for _, nonce in ipairs(queue) do
  table.insert(wishes, redis.call('HGET', WISHES, nonce))
end
return { now, facts, redis.call('HGETALL', NODES), redis.call('HGETALL', LEASES), queue, wishes }
