-- Put in front of every script of the lease table. One pool is seven keys in one hash slot, and no key is named after a
-- node or a slot: each script declares all it touches, and its cost does not grow with the pool.
--
--   nodes   hash  node -> JSON of the node, with "idle" as of its last heartbeat
--   alive   zset  node -> server time (ms) at which its heartbeat is overdue
--   sizes   zset  node -> tokens that one of its slots holds
--   ready   zset  node with a free slot -> band + capacity; the idle band lies below the busy one
--   free    zset  "node:slot" -> 0, so that one node's free slots are a range by name
--   leases  hash  "node:slot" -> "epoch:since:deadline", times in ms of the server
--   epoch   int   the last epoch given out in the pool
--
-- Epochs come from one counter for the pool, not one for each slot: a forgotten node needs no memory of its own to stay
-- fenced, because whatever is granted later is higher. Node names are percent-encoded by the client: no colon in them.
local NODES, ALIVE, SIZES, READY = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local FREE, LEASES, EPOCH = KEYS[5], KEYS[6], KEYS[7]

local BUSY_BAND = 4294967296 -- 2^32, above every capacity

-- Redis' own clock is the only one: callers' clocks differ, and step.
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Lua's own conversion goes to exponents from 1e14 on.
local function int(number)
  return string.format('%.0f', number)
end

local function free_range(node)
  return '[' .. node .. ':', '(' .. node .. ';' -- ';' follows ':'
end

local function read_lease(member)
  local text = redis.call('HGET', LEASES, member)
  if not text then
    return nil
  end
  local epoch, since, deadline = string.match(text, '^(%d+):(%d+):(%d+)$')
  return { epoch = tonumber(epoch), since = tonumber(since), deadline = tonumber(deadline) }
end

local function write_lease(member, epoch, since, deadline)
  redis.call('HSET', LEASES, member, int(epoch) .. ':' .. int(since) .. ':' .. int(deadline))
end

-- Files the node under the band it belongs to, after any change of its leases. A lease makes it busy before the daemon
-- has said so, or two requests would share one daemon while another one idles.
local function rank(node, record)
  local from, to = free_range(node)
  local free = redis.call('ZLEXCOUNT', FREE, from, to)
  if free == 0 then
    redis.call('ZREM', READY, node)
    return
  end
  local band = BUSY_BAND
  if record.idle and free == record.slots then
    band = 0
  end
  redis.call('ZADD', READY, band + record.capacity_tokens, node)
end

-- Its leases end too. They need no further mark: a lease that is not in the table cannot be released, and the counter
-- stands at or above its epoch.
local function remove_node(node)
  local record = redis.call('HGET', NODES, node)
  if record then
    for slot = 0, cjson.decode(record).slots - 1 do
      redis.call('HDEL', LEASES, node .. ':' .. slot)
    end
  end
  local from, to = free_range(node)
  redis.call('ZREMRANGEBYLEX', FREE, from, to)
  redis.call('ZREM', READY, node)
  redis.call('ZREM', SIZES, node)
  redis.call('ZREM', ALIVE, node)
  redis.call('HDEL', NODES, node)
end

-- Each node is removed once for many heartbeats, so the work is paid for by them.
local function remove_dead_nodes(now)
  for _, node in ipairs(redis.call('ZRANGEBYSCORE', ALIVE, '-inf', int(now))) do
    remove_node(node)
  end
end
