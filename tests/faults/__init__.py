"""Faults at the system calls, by injection and for real."""
