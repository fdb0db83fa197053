"""What `penstock doctor` looks at: whether this machine is fit to train on, what is slow on it, and how to mend it.

Nothing is measured and nothing is changed; `penstock probe` measures. Each look is a function that returns `Finding`s
and raises nothing: what cannot be found out is said as that.
"""

from penstock.doctor.examine import examine
from penstock.doctor.finding import Finding, Verdict

__all__ = ["Finding", "Verdict", "examine"]
