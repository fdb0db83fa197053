"""Streams, collectives, host memory and files, without any knowledge of training."""
