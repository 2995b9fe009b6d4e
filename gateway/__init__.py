"""The lane: classify, decide, rewrite, lease, relay, reply. Knows neither Envoy's messages nor vLLM's code."""
