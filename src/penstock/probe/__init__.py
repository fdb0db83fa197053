"""Measures the machine: links, memory, disks, arithmetic, collectives. It knows no engine."""
