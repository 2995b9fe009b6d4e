"""Benchmarks: each runs everything it compares in one go, prints units, and checks itself against goals.toml."""
