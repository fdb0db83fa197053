"""What `penstock plan` is made of: its options, the question that they ask, and the words of the answer.

config.py has the options, question.py makes the model and asks the planner, answer.py tells what it found.
"""
