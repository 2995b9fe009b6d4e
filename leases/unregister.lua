-- Takes a node that is closing out of the pool at once, with its leases. ARGV: node.
-- The epoch counter stays: should the node come back, nothing it is granted repeats an epoch.
remove_node(ARGV[1])
return 1
