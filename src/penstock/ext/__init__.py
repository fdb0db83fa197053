"""Features that the option which asks for them loads: a run without them imports nothing of this package."""
