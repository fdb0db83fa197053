"""Traces and records of a run: one observer on the streams, and its two outputs."""
