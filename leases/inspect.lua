-- Returns the number of free slots, then the record (JSON) of each live node.
remove_dead_nodes(now_ms())
local reply = redis.call('HVALS', NODES)
table.insert(reply, 1, redis.call('ZCARD', FREE))
return reply
