-- Frees a slot after its use, for the lease that holds it and for no other. ARGV: node, slot, epoch, waiter_ttl_ms.
-- Returns 1, or 0 when that epoch does not hold the slot.

-- Of the running mean: the last dozen or so requests say how long one takes now.
local WEIGHT = 1 / 8
local LONGEST_MS = 24 * 3600000

local member, epoch = ARGV[1] .. ':' .. ARGV[2], tonumber(ARGV[3])
local now = now_ms()
expire(now)
local lease = read_lease(member)
local held = lease ~= nil and lease.epoch == epoch
if held then
  end_lease(member, lease)
  local took = now - lease.since
  if lease.since > 0 and took >= 0 and took < LONGEST_MS then -- else the clock was set
    local mean = mean_ms or took
    redis.call('HSET', POOL, 'mean_ms', int(mean + (took - mean) * WEIGHT))
  end
  redis.call('HINCRBY', POOL, 'served', 1)
  free_slot(member)
end
hand_over(now, tonumber(ARGV[4]))
return held and 1 or 0
