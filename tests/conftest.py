"""Settings of the whole suite."""

try:
    from hypothesis import settings
except ImportError:  # a machine with a device may lack it, and the tests for it do not need it
    pass
else:
    # The suite runs on shared machines: how long one example takes says nothing.
    settings.register_profile("suite", deadline=None)
    settings.load_profile("suite")
