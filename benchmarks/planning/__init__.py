"""Parts of `benchmarks/plan.py`: how far the planner is off, and what it takes."""
