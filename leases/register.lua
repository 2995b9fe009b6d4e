-- A heartbeat: publishes a node and its slots, renews them, and takes back what nobody uses.
-- ARGV: node, record (JSON), capacity, ttl_ms, landing_ms, retention_ms, then floor and in_use ('' for none) of each
-- slot from 0 on. Returns epoch and leased (1/0) of each slot.

-- A counter that is missing, or behind what the daemon has seen, lost its history (a restart without persistence, an old
-- snapshot, a failover). Grants that the daemon has not seen may be lost with it, so numbering resumes far above: more
-- than a server can grant between two heartbeats. 2^53 leaves room for 8 billion such losses.
local LOST_HISTORY_GAP = 1048576

local node, record_text, capacity = ARGV[1], ARGV[2], tonumber(ARGV[3])
local ttl_ms, landing_ms, retention_ms = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local FIRST_VIEW = 7
local now = now_ms()
remove_dead_nodes(now)

local function in_use_of(index)
  if ARGV[index + 1] == '' then
    return nil
  end
  return tonumber(ARGV[index + 1])
end

local counter = tonumber(redis.call('GET', EPOCH) or '-1')
local seen = 0
for index = FIRST_VIEW, #ARGV, 2 do
  seen = math.max(seen, tonumber(ARGV[index]), in_use_of(index) or 0)
end
if counter < seen then
  counter = seen + LOST_HISTORY_GAP
  redis.call('SET', EPOCH, int(counter))
end

local function overdue(lease)
  return now >= math.min(lease.since + landing_ms, lease.deadline)
end

-- Ends a lease that nobody used in time. The counter moves too, so that even a daemon which took the lease's own epoch
-- for its floor refuses its holder from now on.
local function take_back(member)
  counter = redis.call('INCR', EPOCH)
  redis.call('HDEL', LEASES, member)
end

local reply = {}
for index = FIRST_VIEW, #ARGV, 2 do
  local member = node .. ':' .. (index - FIRST_VIEW) / 2
  local in_use = in_use_of(index)
  local lease = read_lease(member)
  local used = lease and lease.epoch == in_use
  if lease and not used and overdue(lease) then
    take_back(member)
    lease = nil
  end
  -- The daemon's word stands against a table that has lost the lease, freed it too early, or holds an older one. A newer
  -- lease stays: its holder finds the slot taken at the daemon and gives the lease back.
  if in_use and (not lease or lease.epoch <= in_use) then
    -- No landing time left: once the daemon no longer has it in use, a lost release is made good at the next heartbeat.
    write_lease(member, in_use, 0, 0)
    lease = { epoch = in_use }
  end
  if lease then
    redis.call('ZREM', FREE, member)
  else
    redis.call('ZADD', FREE, 0, member)
  end
  table.insert(reply, lease and lease.epoch or false)
end

redis.call('HSET', NODES, node, record_text)
redis.call('ZADD', ALIVE, now + ttl_ms, node)
redis.call('ZADD', SIZES, capacity, node)
rank(node, cjson.decode(record_text))
for index = 1, 7 do
  redis.call('PEXPIRE', KEYS[index], retention_ms)
end

local states = {}
for _, epoch in ipairs(reply) do
  table.insert(states, epoch or counter)
  table.insert(states, epoch and 1 or 0)
end
return states
