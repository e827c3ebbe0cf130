"""Settings that hold for every test."""

from hypothesis import HealthCheck, settings

# torch's first call exceeds hypothesis's deadline; ours are proofs, not stopwatches.
settings.register_profile(
    "gracekv", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gracekv")
