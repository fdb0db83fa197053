"""What `penstock train` runs, one piece per file, in the order of use.

config -> files -> corpus -> batches -> schedule -> evaluate -> sample, with ranks, metrics and display beside them;
loop.py puts them together.
"""
