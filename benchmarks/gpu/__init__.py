"""The decode step on an H200: checked, timed against the memory's speed, and beside stock vLLM; `python -m benchmarks.gpu`."""
