"""What the processes of ranks have in common: imported once, by the process that they are forked from.

Each costs a rank that imports it by itself more than most of its work: dynamo, which the first optimizer imports, more
than a second; what builds engines, with pytest, a third of one.
"""

import contextlib
import gc

import torch
import torch._dynamo
import torch.distributed
import torch.distributed.device_mesh  # noqa: F401

import tests.lib.engines
import tests.lib.refusals  # noqa: F401

with contextlib.suppress(ImportError):  # a machine with a device may lack it
    import transformers.models.llama.modeling_llama  # noqa: F401

gc.collect()
gc.freeze()  # else the first collection of each rank would write to, and so copy, every page with an object
