"""The optimizer step: measure, decide, scale or skip, update."""
