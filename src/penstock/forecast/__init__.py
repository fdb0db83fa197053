"""What a step costs on a machine: figures, programs, times, bounds and plans. Values; no engine."""
