-- What gateways look at all the time: its cost grows with the number of model cards, of which a pool has one, and two
-- while its daemons are being replaced. ARGV: waiter_ttl_ms, nodes to name for each card, a random number that
-- chooses them.
-- Returns nodes, free slots, leased slots, waiters, then the record (JSON) of some nodes of each card.
local now = now_ms()
expire(now)
hand_over(now, tonumber(ARGV[1]))
local reply = {
  redis.call('HLEN', NODES),
  redis.call('ZCARD', FREE),
  redis.call('HLEN', LEASES),
  redis.call('ZCARD', QUEUE),
}
local from = '-'
while true do
  local first = redis.call('ZRANGEBYLEX', SIZES, from, '+', 'LIMIT', 0, 1)[1]
  if not first then
    return reply
  end
  local card = string.match(first, '^[^/]+')
  local start, stop = range(card, '/')
  local skipped = tonumber(ARGV[3]) % math.max(1, count(SIZES, card, '/') - ARGV[2] + 1)
  for _, member in ipairs(redis.call('ZRANGEBYLEX', SIZES, start, stop, 'LIMIT', int(skipped), ARGV[2])) do
    table.insert(reply, redis.call('HGET', NODES, string.match(member, '[^/]+$')))
  end
  from = '[' .. card .. '0'
end
