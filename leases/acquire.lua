-- Grants the best free slot: an idle node before a busy one, then the smallest capacity that fits, so that large slots
-- are left for long prompts.
-- KEYS[8]: the grant kept for this nonce. ARGV: tokens, lease_ms, then nodes to avoid.
-- Returns 'granted', record (JSON), slot, epoch; or the reason alone.
local GRANT = KEYS[8]
local tokens, lease_ms = tonumber(ARGV[1]), tonumber(ARGV[2])
local now = now_ms()
remove_dead_nodes(now)

local function granted(member, epoch)
  local node, slot = string.match(member, '^(.*):(%d+)$')
  return { 'granted', redis.call('HGET', NODES, node), tonumber(slot), epoch }
end

-- A caller that lost the reply asks again. The grant is repeated only while it is the slot's lease: one that was taken
-- back would be refused by the daemon.
local kept = redis.call('GET', GRANT)
if kept then
  local epoch, member = string.match(kept, '^(%d+):(.*)$')
  local lease = read_lease(member)
  if lease and lease.epoch == tonumber(epoch) then
    return granted(member, lease.epoch)
  end
end

local avoided, avoided_count = {}, 0
for index = 3, #ARGV do
  avoided[ARGV[index]] = true
  avoided_count = avoided_count + 1
end

local function pick(band)
  local from, to = int(band + tokens), '(' .. int(band + BUSY_BAND)
  local nodes = redis.call('ZRANGEBYSCORE', READY, from, to, 'LIMIT', 0, avoided_count + 1)
  for _, node in ipairs(nodes) do
    if not avoided[node] then
      return node
    end
  end
  return nil
end

-- Without the counter an epoch could be given out twice; the next heartbeat restores it.
if redis.call('ZCARD', ALIVE) == 0 or redis.call('EXISTS', EPOCH) == 0 then
  return { 'unknown_pool' }
end
local node = pick(0) or pick(BUSY_BAND)
if not node then
  local largest = redis.call('ZRANGE', SIZES, -1, -1, 'WITHSCORES')
  if tonumber(largest[2]) < tokens then
    return { 'too_large' }
  end
  return { 'busy' }
end

local from, to = free_range(node)
local member = redis.call('ZRANGEBYLEX', FREE, from, to, 'LIMIT', 0, 1)[1]
local epoch = redis.call('INCR', EPOCH)
redis.call('ZREM', FREE, member)
write_lease(member, epoch, now, now + lease_ms)
redis.call('SET', GRANT, int(epoch) .. ':' .. member, 'PX', int(lease_ms))
rank(node, cjson.decode(redis.call('HGET', NODES, node)))
return granted(member, epoch)
