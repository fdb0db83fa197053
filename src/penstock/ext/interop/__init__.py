"""Weights and checkpoints of other libraries: a checkpoint exported to the one, made of the other."""
