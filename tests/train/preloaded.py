"""What ranks of these tests have in common, besides what all ranks have (`tests.preloaded`): imported once."""

import gc

import accelerate  # noqa: F401
import peft  # noqa: F401
import transformers.trainer  # noqa: F401
import trl.scripts.sft  # noqa: F401
from trl import SFTTrainer  # noqa: F401

gc.collect()
gc.freeze()
