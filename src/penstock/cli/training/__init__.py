"""What `penstock train` runs.

settings/ and config.py say what can be asked for, recipe.py the numbers that follow from it, request.py whether it can
be. data/ makes batches of rows, learning/ a model that learns from them, reporting/ tells how it goes. run.py plans a
run and reads its data, session.py is what its ranks then do together; looking.py is `penstock data`.
"""
