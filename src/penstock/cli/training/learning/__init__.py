"""How a model learns: model.py builds it, optimizer.py says how it is prepared, loop.py makes the steps.

schedule.py is the learning rate, loss.py what is lowered, evaluation.py and best.py how good it is, checkpoints.py how
a run goes on.
"""
