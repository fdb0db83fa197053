"""The training step: units, their hooks, gathers, reductions and updates."""
