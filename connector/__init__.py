"""The vLLM side of the handoff: a pure KV producer on the public connector interface.

Loaded with vLLM's `--kv-transfer-config`, with these values:
`{"kv_connector": "AnchorlegConnector", "kv_connector_module_path": "connector", "kv_role": "kv_producer"}`.
A request without a valid claim is an ordinary vLLM request: nothing is held, sent or delayed for it.
"""

from connector.connector import AnchorlegConnector

__all__ = ["AnchorlegConnector"]
