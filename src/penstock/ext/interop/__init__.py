"""Checkpoints of other libraries, and their pickles, as checkpoints of ours."""
