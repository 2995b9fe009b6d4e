// A few threads that work together for some milliseconds and sleep between.
#pragma once

struct Team;

// Start `size` - 1 threads beside the caller's; `cores` ([size], or null) says where each runs while it works, the caller's
// first. Returns null when the system has no thread left.
Team *team_open(int size, const int *cores);

// Run `work(argument, thread)` on every thread, the caller's included, and return when all have ended.
void team_run(Team *team, void (*work)(void *, int), void *argument);

void team_close(Team *team);
