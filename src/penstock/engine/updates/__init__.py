"""The step: its decision, and the updates of tiles."""
