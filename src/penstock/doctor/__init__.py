"""What `penstock doctor` looks at: whether this machine is fit to train on, what is slow on it, and how to mend it.

Nothing is measured and nothing is changed; `penstock probe` measures. `looks` has the looks, each a function that
yields `Finding`s.
"""

from penstock.doctor.looks import Finding, Verdict, examine

__all__ = ["Finding", "Verdict", "examine"]
