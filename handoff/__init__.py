"""The contract between the legs: claims, control messages, KV layouts, transports and the decode stream.

Knows neither Envoy nor Redis nor vLLM, so that a vLLM image needs only this room, `process` and the connector.
"""
