-- A heartbeat: publishes a node and its slots, renews them, and takes back what nobody uses.
-- ARGV: node, record (JSON), card, capacity, idle (1/0), busy_ms, draining (1/0), ttl_ms, landing_ms, waiter_ttl_ms,
-- retention_ms, then floor and in_use ('' for none) of each slot from 0 on. Returns epoch and leased (1/0) of each slot.

-- A counter that is missing, or behind what the daemon has seen, lost its history (a restart without persistence, an old
-- snapshot, a failover). Grants that the daemon has not seen may be lost with it, so numbering resumes far above: more
-- than a server can grant between two heartbeats. 2^53 leaves room for 8 billion such losses.
local LOST_HISTORY_GAP = 1048576

local FIRST_VIEW = 12
local node, record = ARGV[1], ARGV[2]
local traits = {
  card = ARGV[3],
  capacity = tonumber(ARGV[4]),
  slots = (#ARGV - FIRST_VIEW + 1) / 2,
  idle = ARGV[5] == '1',
  draining = ARGV[7] == '1',
}
local busy_ms, ttl_ms, landing_ms = tonumber(ARGV[6]), tonumber(ARGV[8]), tonumber(ARGV[9])
local waiter_ttl_ms, retention_ms = tonumber(ARGV[10]), tonumber(ARGV[11])
local now = now_ms()
expire(now)

local function in_use_of(index)
  if ARGV[index + 1] == '' then
    return nil
  end
  return tonumber(ARGV[index + 1])
end

local counter = last_epoch or -1
local seen = 0
for index = FIRST_VIEW, #ARGV, 2 do
  seen = math.max(seen, tonumber(ARGV[index]), in_use_of(index) or 0)
end
if counter < seen then
  counter = seen + LOST_HISTORY_GAP
  redis.call('HSET', POOL, 'epoch', int(counter))
end

local function overdue(lease)
  -- Granted in the future is a clock that was set back.
  return lease.stage == 'u' or now < lease.since or now >= math.min(lease.since + landing_ms, lease.deadline)
end

-- Ends a lease that nobody used in time. The counter moves too, so that even a daemon which took the lease's own epoch
-- for its floor refuses its holder from now on.
local function take_back(member, lease)
  counter = redis.call('HINCRBY', POOL, 'epoch', 1)
  end_lease(member, lease)
end

local leased = 0
local epochs = {}
for index = FIRST_VIEW, #ARGV, 2 do
  local member = node .. ':' .. int((index - FIRST_VIEW) / 2)
  local in_use = in_use_of(index)
  local lease = read_lease(member)
  local used = lease and lease.epoch == in_use
  if lease and not used and overdue(lease) then
    take_back(member, lease)
    lease = nil
  end
  -- The daemon's word stands against a table that has lost the lease, freed it too early, or holds an older one. A newer
  -- lease stays: its holder finds the slot taken at the daemon and gives the lease back.
  if in_use and (not lease or lease.epoch < in_use) then
    if lease then
      end_lease(member, lease)
    end
    lease = { epoch = in_use, since = 0, deadline = 0, stage = 'u', nonce = '', tenant = '', holder = '' }
    write_lease(member, lease)
  elseif used and lease.stage ~= 'u' then
    -- No landing time is left: once the daemon no longer has it in use, a lost release is made good at the next heartbeat.
    if lease.stage == 'o' then
      redis.call('ZREM', DEADLINES, 'o/' .. member)
    end
    lease.stage = 'u'
    write_lease(member, lease)
  end
  if lease then
    leased = leased + 1
  end
  if lease or traits.draining then
    redis.call('ZREM', FREE, member)
  else
    redis.call('ZADD', FREE, 0, member)
  end
  table.insert(epochs, lease and lease.epoch or false)
end

local size = traits.card .. '/' .. capacity_name(traits.capacity) .. '/' .. node
local before = read_traits(node)
traits.filed = ''
if before and before.card == traits.card and before.capacity == traits.capacity then
  traits.filed = before.filed
elseif before then
  -- A node of another size: nothing may stand under its old name.
  redis.call('ZREM', SIZES, before.card .. '/' .. capacity_name(before.capacity) .. '/' .. node)
  write_traits(node, before, 0)
end
traits.free_at = now + busy_ms
if traits.idle then
  -- Leased, and the daemon has not heard of it yet.
  traits.free_at = now + leased * (mean_ms or 0)
end
if traits.draining then
  redis.call('ZREM', SIZES, size)
else
  redis.call('ZADD', SIZES, 0, size)
end
redis.call('HSET', NODES, node, record)
redis.call('ZADD', DEADLINES, int(now + ttl_ms), 'n/' .. node)
write_traits(node, traits, traits.slots - leased)
hand_over(now, waiter_ttl_ms)

for _, key in ipairs(KEYS) do
  redis.call('PEXPIRE', key, int(retention_ms))
end

local states = {}
for index, epoch in ipairs(epochs) do
  if not epoch then
    -- The hand-over may have leased it since.
    local lease = read_lease(node .. ':' .. int(index - 1))
    epoch = lease and lease.epoch
  end
  table.insert(states, epoch or tonumber(redis.call('HGET', POOL, 'epoch')))
  table.insert(states, epoch and 1 or 0)
end
return states
