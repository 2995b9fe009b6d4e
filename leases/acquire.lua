-- Grants a slot, or queues the wish; repeated with its nonce, it returns the grant or says that the wait goes on.
-- ARGV: nonce, card, tokens, lease_ms, wait_ms, waiter_ttl_ms, max_waiting, tenant, tenant_leases, tenant_waiting, holder,
-- channel, nodes to avoid (comma between them).
-- Returns 'granted', record (JSON), slot, epoch; 'waiting'; or the reason and an estimate of the wait in ms (-1: none).
local wish = {
  nonce = ARGV[1],
  card = ARGV[2],
  tokens = tonumber(ARGV[3]),
  lease_ms = tonumber(ARGV[4]),
  tenant = ARGV[8],
  tenant_leases = tonumber(ARGV[9]),
  holder = ARGV[11],
  channel = ARGV[12],
  avoid = ARGV[13],
}
local patience_ms, waiter_ttl_ms, max_waiting = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local tenant_waiting = tonumber(ARGV[10])
local now = now_ms()

local function granted(member, epoch)
  local node, slot = string.match(member, '^(.*):(%d+)$')
  return { 'granted', redis.call('HGET', NODES, node), tonumber(slot), epoch }
end

-- Returns the grant that this nonce already has. It is repeated only while it is the slot's lease: one that was taken back
-- would be refused by the daemon.
local function fetch(kept)
  local lease = kept and kept.granted and read_lease(kept.member)
  if not lease or lease.epoch ~= kept.epoch then
    return nil
  end
  local overdue = redis.call('ZSCORE', DEADLINES, 'n/' .. node_of(kept.member))
  if not overdue or tonumber(overdue) <= now then
    return nil
  end
  if lease.stage == 'o' then
    redis.call('ZREM', DEADLINES, 'o/' .. kept.member)
    lease.stage = 'g'
    lease.deadline = now + wish.lease_ms
    write_lease(kept.member, lease)
  end
  return granted(kept.member, kept.epoch)
end

local kept = read_wish(wish.nonce)
local repeated = fetch(kept)
if repeated then
  return repeated
end
if kept and kept.waiting then
  -- Before anything else, or this call could count its own caller as gone.
  redis.call('ZADD', DEADLINES, int(math.min(now + waiter_ttl_ms, kept.give_up)), 'w/' .. wish.nonce)
end
expire(now)
hand_over(now, waiter_ttl_ms)
if kept and kept.waiting then
  kept = read_wish(wish.nonce)
  repeated = fetch(kept)
  if repeated then
    return repeated
  end
end
local waits = kept and kept.waiting

local function refuse(reason, estimate)
  if waits then
    forget_waiter(kept)
  end
  return { reason, estimate or -1 }
end

-- Without the counter an epoch could be given out twice; the next heartbeat restores it.
if not last_epoch then
  return refuse('unknown_pool')
end
local tenant_full = tenant_is_full(wish)
if not waits and not tenant_full then
  local node = pick(wish, now)
  if node then
    return granted(lease_slot(node, wish, now, now + wish.lease_ms, 'g'))
  end
end

local _, to = range(wish.card, '/')
if redis.call('ZLEXCOUNT', SIZES, '[' .. wish.card .. '/' .. capacity_name(wish.tokens), to) == 0 then
  return refuse(count(SIZES, wish.card, '/') == 0 and 'unknown_pool' or 'too_large')
end
if waits and patience_ms > 0 then
  return { 'waiting' }
end

local waiting = redis.call('ZCARD', QUEUE)
local estimate = wait_ms(waiting, redis.call('ZCARD', FREE) + redis.call('HLEN', LEASES))
local tenants_own = 0
if wish.tenant ~= '' then
  tenants_own = count(TENANTS, wish.tenant .. '/w', '/')
end
if waits or patience_ms == 0 then
  if tenant_full then
    return refuse('tenant_limit', wait_ms(tenants_own, wish.tenant_leases))
  end
  return refuse('busy', estimate)
end
if tenant_waiting > 0 and wish.tenant ~= '' and tenants_own >= tenant_waiting then
  return refuse('tenant_limit', estimate)
end
if waiting >= max_waiting then
  return refuse('queue_full', estimate)
end
wish.give_up = now + patience_ms
write_waiter(wish)
redis.call('ZADD', QUEUE, redis.call('HINCRBY', POOL, 'number', 1), wish.nonce)
redis.call('ZADD', DEADLINES, int(math.min(now + waiter_ttl_ms, wish.give_up)), 'w/' .. wish.nonce)
if wish.tenant ~= '' then
  redis.call('ZADD', TENANTS, 0, wish.tenant .. '/w/' .. wish.nonce)
end
return { 'waiting' }
