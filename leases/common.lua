-- Put in front of every script of the lease table. One pool is eleven keys in one hash slot, and no key is named after a
-- node, a slot or a request: each script declares all it touches. Of all but `inspect` the cost does not grow with the
-- pool; it grows with the queue only when a slot becomes free that fits none of those who wait.
--
--   nodes      hash  node -> a line of JSON of the node and one of its last heartbeat, for readers: no script looks inside
--   traits     hash  node -> "card capacity slots idle free_at draining filed", what scripts need to know of it; filed is
--                    the free_at under which it stands in `ready`, or empty
--   deadlines  zset  "n/node" -> when its heartbeat is overdue; "o/member" -> when a slot that was handed to a waiter and
--                    not fetched goes to the next; "w/nonce" -> when a waiter that did not ask again counts as gone
--   sizes      lex   "card/capacity/node" of every node that takes requests
--   ready      lex   "card/capacity/free_at/node" of every node with a free slot; free_at is 0 while it is idle
--   free       lex   "node:slot", so that one node's free slots are a range by name
--   leases     hash  "node:slot" -> "epoch since deadline stage nonce tenant holder"; stage: o(ffered) to a waiter that has
--                    not fetched it, g(ranted), u(sed) by the daemon
--   wishes     hash  nonce -> "granted epoch member", or "waiting ..." (write_waiter)
--   queue      zset  nonce of a waiter -> its number in the order of arrival
--   tenants    lex   "tenant/l/member" and "tenant/w/nonce": counted as ranges, so no count can drift
--   pool       hash  epoch: the last one given out; number: of the last waiter; mean_ms, served: of recent leases
--
-- "lex" is a zset whose scores are all 0, "member" is "node:slot", times are ms of the server's own clock. Names are
-- percent-encoded by the client: no colon, slash or space in them. '0' follows '/' and ';' follows ':', which is how
-- ranges by prefix end.
--
-- Epochs come from one counter for the pool, not one for each slot: a forgotten node needs no memory of its own to stay
-- fenced, because whatever is granted later is higher.
local NODES, TRAITS, DEADLINES, SIZES, READY, FREE = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local LEASES, WISHES, QUEUE, TENANTS, POOL = KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11]

local IDLE = string.rep('0', 14) -- free_at of an idle node
local MOST_AT_ONCE = 100 -- entries that one call clears away, so that no call takes long

-- Whether this call made something free that a waiter may want. After each call nothing is free that fits one, so only a
-- change is a reason to look through the queue.
local changed = false

-- Whether `expire` has left something that is over: then `pick` looks closely.
local crowded = false

-- Of the pool, once `expire` has run: the last epoch given out (nil: the pool is not there), and how long leases are held.
local last_epoch, mean_ms = nil, nil

-- Redis' own clock is the only one: callers' clocks differ, and step.
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Lua's own conversion goes to exponents from 1e14 on.
local function int(number)
  return string.format('%d', number)
end

-- Zero-padded, so that names sort like numbers: ten digits hold a capacity, fourteen a time.
local function capacity_name(tokens)
  return string.format('%010d', tokens)
end

local function range(prefix, separator)
  local after = { ['/'] = '0', [':'] = ';' }
  return '[' .. prefix .. separator, '(' .. prefix .. after[separator]
end

local function count(key, prefix, separator)
  return redis.call('ZLEXCOUNT', key, range(prefix, separator))
end

--- Leases and slots ---

local function read_lease(member)
  local text = redis.call('HGET', LEASES, member)
  if not text then
    return nil
  end
  local epoch, since, deadline, stage, nonce, tenant, holder =
    string.match(text, '^(%d+) (%d+) (%d+) (%a) (%S*) (%S*) (%S*)$')
  return {
    epoch = tonumber(epoch),
    since = tonumber(since),
    deadline = tonumber(deadline),
    stage = stage,
    nonce = nonce,
    tenant = tenant,
    holder = holder,
  }
end

local function write_lease(member, lease)
  local times = int(lease.epoch) .. ' ' .. int(lease.since) .. ' ' .. int(lease.deadline) .. ' ' .. lease.stage
  redis.call('HSET', LEASES, member, times .. ' ' .. lease.nonce .. ' ' .. lease.tenant .. ' ' .. lease.holder)
end

local function granted_wish(member, epoch)
  return 'granted ' .. int(epoch) .. ' ' .. member
end

local function read_traits(node)
  local text = redis.call('HGET', TRAITS, node)
  if not text then
    return nil
  end
  local card, capacity, slots, idle, free_at, draining, filed =
    string.match(text, '^(%S+) (%d+) (%d+) (%d) (%d+) (%d) (%d*)$')
  return {
    card = card,
    capacity = tonumber(capacity),
    slots = tonumber(slots),
    idle = idle == '1',
    free_at = tonumber(free_at),
    draining = draining == '1',
    filed = filed,
  }
end

-- Writes the traits of a node that has `free` free slots, and files it where `pick` finds it: to call after any change of
-- its leases. A lease makes it busy before the daemon has said so, or two requests would share one daemon while another
-- one idles.
local function write_traits(node, traits, free)
  local filed = ''
  if free > 0 and not traits.draining then
    filed = IDLE
    if free < traits.slots or not traits.idle then
      filed = string.format('%014d', traits.free_at)
    end
  end
  local size = traits.card .. '/' .. capacity_name(traits.capacity) .. '/'
  if filed ~= traits.filed then
    if traits.filed ~= '' then
      redis.call('ZREM', READY, size .. traits.filed .. '/' .. node)
    end
    if filed ~= '' then
      redis.call('ZADD', READY, 0, size .. filed .. '/' .. node)
      changed = true
    end
  end
  local text = traits.card .. ' ' .. int(traits.capacity) .. ' ' .. int(traits.slots) .. (traits.idle and ' 1 ' or ' 0 ')
  redis.call('HSET', TRAITS, node, text .. int(traits.free_at) .. (traits.draining and ' 1 ' or ' 0 ') .. filed)
end

local function node_of(member)
  return string.match(member, '^(.*):%d+$')
end

-- The one way a lease goes, so that nothing that was filed with it stays behind. The slot is not free yet.
local function end_lease(member, lease, wish_is_its_own)
  redis.call('HDEL', LEASES, member)
  if lease.stage == 'o' then
    redis.call('ZREM', DEADLINES, 'o/' .. member)
  end
  if lease.tenant ~= '' then
    redis.call('ZREM', TENANTS, lease.tenant .. '/l/' .. member)
    changed = true
  end
  if wish_is_its_own or lease.nonce ~= '' and redis.call('HGET', WISHES, lease.nonce) == granted_wish(member, lease.epoch) then
    redis.call('HDEL', WISHES, lease.nonce)
  end
end

local function free_slot(member)
  local node = node_of(member)
  local traits = read_traits(node)
  if traits and not traits.draining then
    redis.call('ZADD', FREE, 0, member)
    write_traits(node, traits, count(FREE, node, ':'))
  end
end

-- Its leases end too. They need no further mark: a lease that is not in the table cannot be released, and the counter
-- stands at or above its epoch.
local function remove_node(node)
  local traits = read_traits(node)
  if traits then
    for slot = 0, traits.slots - 1 do
      local member = node .. ':' .. slot
      local lease = read_lease(member)
      if lease then
        end_lease(member, lease)
      end
      redis.call('ZREM', FREE, member)
    end
    traits.draining = true
    write_traits(node, traits, 0)
    redis.call('ZREM', SIZES, traits.card .. '/' .. capacity_name(traits.capacity) .. '/' .. node)
    redis.call('HDEL', TRAITS, node)
  end
  redis.call('ZREM', DEADLINES, 'n/' .. node)
  redis.call('HDEL', NODES, node)
end

--- Wishes ---

-- A caller's wish, from a script's ARGV or from the table.
local function read_wish(nonce)
  local text = redis.call('HGET', WISHES, nonce)
  if not text then
    return nil
  end
  local epoch, member = string.match(text, '^granted (%d+) (.*)$')
  if epoch then
    return { granted = true, nonce = nonce, epoch = tonumber(epoch), member = member }
  end
  local card, tokens, lease_ms, give_up, tenant, tenant_leases, holder, channel, avoid =
    string.match(text, '^waiting (%S+) (%d+) (%d+) (%d+) (%S*) (%d+) (%S*) (%S*) (%S*)$')
  return {
    waiting = true,
    nonce = nonce,
    card = card,
    tokens = tonumber(tokens),
    lease_ms = tonumber(lease_ms),
    give_up = tonumber(give_up),
    tenant = tenant,
    tenant_leases = tonumber(tenant_leases),
    holder = holder,
    channel = channel,
    avoid = avoid,
  }
end

local function write_waiter(wish)
  local demand = wish.card .. ' ' .. int(wish.tokens) .. ' ' .. int(wish.lease_ms) .. ' ' .. int(wish.give_up)
  local tenant = wish.tenant .. ' ' .. int(wish.tenant_leases)
  local way = wish.holder .. ' ' .. wish.channel .. ' ' .. wish.avoid
  redis.call('HSET', WISHES, wish.nonce, 'waiting ' .. demand .. ' ' .. tenant .. ' ' .. way)
end

local function leave_queue(wish)
  redis.call('ZREM', QUEUE, wish.nonce)
  redis.call('ZREM', DEADLINES, 'w/' .. wish.nonce)
  if wish.tenant ~= '' then
    redis.call('ZREM', TENANTS, wish.tenant .. '/w/' .. wish.nonce)
  end
end

local function forget_waiter(wish)
  leave_queue(wish)
  redis.call('HDEL', WISHES, wish.nonce)
end

local function tenant_is_full(wish)
  return wish.tenant ~= '' and wish.tenant_leases > 0 and count(TENANTS, wish.tenant .. '/l', '/') >= wish.tenant_leases
end

-- The best node for a wish: an idle one before the one that will be free soonest, and among equals the smallest that fits.
-- One look for each capacity there is, and nodes of one pool come in few.
local function best_node(wish)
  local avoided, avoided_count = {}, 0
  for node in string.gmatch(wish.avoid, '[^,]+') do
    avoided[node] = true
    avoided_count = avoided_count + 1
  end
  local best, best_free_at
  local _, to = range(wish.card, '/')
  local tokens = wish.tokens
  while true do
    local from = '[' .. wish.card .. '/' .. capacity_name(tokens)
    local members = redis.call('ZRANGEBYLEX', READY, from, to, 'LIMIT', 0, avoided_count + 1)
    if #members == 0 then
      return best
    end
    local smallest
    for _, member in ipairs(members) do
      local capacity, free_at, node = string.match(member, '/(%d+)/(%d+)/([^/]+)$')
      smallest = smallest or capacity
      if capacity ~= smallest then
        break
      end
      if not avoided[node] then
        if not best or free_at < best_free_at then
          best, best_free_at = node, free_at
        end
        break
      end
    end
    if best_free_at == IDLE then
      return best
    end
    tokens = tonumber(smallest) + 1
  end
end

-- The best node that lives.
local function pick(wish, now)
  for removed = 0, MOST_AT_ONCE do
    local node = best_node(wish)
    if not node or not crowded or tonumber(redis.call('ZSCORE', DEADLINES, 'n/' .. node) or '0') > now then
      return node
    end
    if removed < MOST_AT_ONCE then
      remove_node(node)
    end
  end
  return nil -- more of the dead are in front of the living: the next call goes on
end

-- Leases a free slot of the node until `deadline`, and returns its member and epoch.
local function lease_slot(node, wish, now, deadline, stage)
  local from, to = range(node, ':')
  local free = redis.call('ZRANGEBYLEX', FREE, from, to, 'LIMIT', 0, 2)
  local member = free[1]
  local epoch = redis.call('HINCRBY', POOL, 'epoch', 1)
  redis.call('ZREM', FREE, member)
  write_lease(member, {
    epoch = epoch,
    since = now,
    deadline = deadline,
    stage = stage,
    nonce = wish.nonce,
    tenant = wish.tenant,
    holder = wish.holder,
  })
  redis.call('HSET', WISHES, wish.nonce, granted_wish(member, epoch))
  if wish.tenant ~= '' then
    redis.call('ZADD', TENANTS, 0, wish.tenant .. '/l/' .. member)
  end
  -- A guess, until the daemon says better: it will be busy for as long as requests usually take here.
  local traits = read_traits(node)
  traits.free_at = math.max(traits.free_at, now) + (mean_ms or 0)
  write_traits(node, traits, #free - 1)
  return member, epoch
end

-- Gives free slots to those who wait, in the order of arrival; one that nothing free fits lets the next pass. The slot is
-- kept for the waiter for as long as a waiter may be silent, and goes to the next one after that. Call `expire` before.
local function hand_over(now, waiter_ttl_ms)
  if not changed or redis.call('ZCARD', QUEUE) == 0 then
    return
  end
  local passed = 0
  local unfit = {} -- card -> the fewest tokens that nothing free holds
  local full = {} -- tenants that hold all they may
  while redis.call('ZCARD', READY) > 0 do
    local nonces = redis.call('ZRANGE', QUEUE, int(passed), int(passed + 31))
    if #nonces == 0 then
      return
    end
    for _, nonce in ipairs(nonces) do
      local wish = read_wish(nonce)
      local node
      if full[wish.tenant] == nil then
        full[wish.tenant] = tenant_is_full(wish)
      end
      if wish.tokens < (unfit[wish.card] or math.huge) and not full[wish.tenant] then
        node = pick(wish, now)
        if not node and wish.avoid == '' then
          unfit[wish.card] = wish.tokens
        end
      end
      if node then
        leave_queue(wish)
        full[wish.tenant] = nil
        local member = lease_slot(node, wish, now, now + waiter_ttl_ms, 'o')
        redis.call('ZADD', DEADLINES, int(now + waiter_ttl_ms), 'o/' .. member)
        redis.pcall('PUBLISH', wish.channel, nonce) -- a hint: who may not publish does without
      else
        passed = passed + 1
      end
    end
  end
end

-- Removes dead nodes and waiters, and takes back what was handed to a waiter and not fetched: nobody was told of that
-- grant, so nobody can be using it. Each entry is paid for by the calls that renewed it.
local function expire(now)
  local facts = redis.call('HMGET', POOL, 'epoch', 'mean_ms')
  last_epoch, mean_ms = tonumber(facts[1] or ''), tonumber(facts[2] or '')
  if not last_epoch then
    -- The pool is gone, or was never there. What is left of it, because its keys did not all run out at once, misleads.
    redis.call('DEL', unpack(KEYS))
    return
  end
  local over = redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', int(now), 'LIMIT', 0, MOST_AT_ONCE)
  crowded = #over == MOST_AT_ONCE
  changed = changed or #over > 0
  for _, entry in ipairs(over) do
    local kind, name = string.sub(entry, 1, 2), string.sub(entry, 3)
    if kind == 'n/' then
      remove_node(name)
    elseif kind == 'w/' then
      local wish = read_wish(name)
      if wish and wish.waiting then
        forget_waiter(wish)
      else
        redis.call('ZREM', DEADLINES, entry)
      end
    elseif kind == 'o/' then
      local lease = read_lease(name)
      if lease and lease.stage == 'o' then
        end_lease(name, lease)
        free_slot(name)
      else
        redis.call('ZREM', DEADLINES, entry)
      end
    end
  end
end

-- How long a slot will probably take to become free: by Little's law `slots` slots, each held for the mean time, free one
-- every mean / slots. -1 while nothing is known.
local function wait_ms(ahead, slots)
  if not mean_ms or slots == 0 then
    return -1
  end
  return math.ceil(mean_ms * (ahead + 1) / slots)
end
