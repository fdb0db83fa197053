"""The data of a run, from what its options name to batches on the device.

reading/ knows files, encoding/ makes token ids and labels of their rows, sequences/ what of them a model sees at once.
dataset.py puts them together, feed.py is what the loop reads, showing.py what people see of them.
"""
