"""Draft heads that come with the engine, each for the model whose fingerprint its file names; benchmarks/head made them."""
