"""Settings of the whole suite."""

from hypothesis import settings

# The suite runs on shared machines: how long one example takes says nothing.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
