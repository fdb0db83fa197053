"""Ring attention: torch's own, where the device has it."""

from penstock.ext.long_context import ring_attention

__all__ = ["ring_attention"]
