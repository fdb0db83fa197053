"""The options of `penstock train`, a file for each heading of its help.

data.py says what is read and how it is cut, model.py what is trained, state.py where its state lives, learning.py how
it learns, reports.py what is measured and kept. `penstock.cli.training.config.TrainConfig` is all of them.
"""
