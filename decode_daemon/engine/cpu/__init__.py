"""The native step for CPUs: C++ built once on the machine that runs it, and what loads it."""
