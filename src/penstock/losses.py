"""The cross-entropy of a linear head, without ever having all of its logits in memory."""

from penstock.ext.long_context import CHUNK_BYTES, LEAST_WIDTH, linear_cross_entropy

__all__ = ["CHUNK_BYTES", "LEAST_WIDTH", "linear_cross_entropy"]
