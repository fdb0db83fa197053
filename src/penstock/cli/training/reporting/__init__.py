"""What a run tells while it trains.

progress.py says what is told after a step, formats.py how numbers look. gauges.py reads what the loop does not know:
speed.py the share of the device's speed, memory.py peaks, waits.py what steps wait for. reports.py tells all of it, to
people by display.py and summary.py, to programs by trackers.py. samples.py writes what the model says.
"""
