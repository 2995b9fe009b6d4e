-- Takes a node that is closing out of the pool at once, with its leases. ARGV: node, waiter_ttl_ms.
-- The epoch counter stays: should the node come back, nothing it is granted repeats an epoch.
local now = now_ms()
expire(now)
remove_node(ARGV[1])
hand_over(now, tonumber(ARGV[2]))
return 1
