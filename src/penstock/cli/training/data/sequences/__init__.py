"""From encoded rows to batches.

prepared.py keeps the samples of a source on disk, written once and mapped by every rank. held_out.py divides its rows
into those that are trained on and those that are held out. packing.py arranges them in sequences, order.py says which
sequence comes when and to which rank, batches.py makes tensors of them.
"""
