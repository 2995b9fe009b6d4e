-- Frees a slot, for the lease that holds it and for no other.
-- ARGV: node, slot, epoch. Returns 1, or 0 when that epoch does not hold the slot.
local node, epoch = ARGV[1], tonumber(ARGV[3])
local member = node .. ':' .. ARGV[2]
local lease = read_lease(member)
if not lease or lease.epoch ~= epoch then
  return 0
end
redis.call('HDEL', LEASES, member)
redis.call('ZADD', FREE, 0, member)
rank(node, cjson.decode(redis.call('HGET', NODES, node)))
return 1
