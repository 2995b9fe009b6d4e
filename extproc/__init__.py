"""Envoy's external processing protocol in and out of the gateway. No business rule lives here."""
