"""Checkpoints of `torch.distributed.checkpoint`: of FSDP2, torchtitan, accelerate."""

from penstock.integrations.dcp.importing import import_checkpoint

__all__ = ["import_checkpoint"]
