"""Settings of all tests: a busy machine is no reason for a property to fail."""

from hypothesis import HealthCheck, settings

settings.register_profile("anchorleg", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("anchorleg")
