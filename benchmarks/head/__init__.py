"""A draft head made from a model's own text: generate, train, measure; `python -m benchmarks.head --help`."""
