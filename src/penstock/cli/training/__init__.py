"""What `penstock train` runs.

config.py says what is asked for. data.py makes batches of text, model.py the model, optimizer.py its optimizer; loop.py
trains, reporting/ tells how it goes, checkpoints.py lets a run go on. run.py puts them together.
"""
