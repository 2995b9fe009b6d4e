-- Ends a wish: a waiter leaves the queue, an unused grant goes back. ARGV: nonce, waiter_ttl_ms.
-- Returns 1, or 0 when there was nothing to end: never granted, over, or given back before.
local now = now_ms()
local wish = read_wish(ARGV[1])
local ended = 0
if wish and wish.waiting then
  forget_waiter(wish)
  ended = 1
elseif wish then
  local lease = read_lease(wish.member)
  if lease and lease.epoch == wish.epoch then
    end_lease(wish.member, lease, true)
    free_slot(wish.member)
    ended = 1
  end
end
expire(now)
hand_over(now, tonumber(ARGV[2]))
return ended
