"""`Trainer` of transformers, and every subclass of it, on Penstock.

    trainer = trainer_class(Trainer, placement=penstock.Placement(optimizer="cpu"))(model=model, args=args, ...)

config       arguments of `prepare` from a file, from the environment, from a call
settings     what TrainingArguments and Penstock are both told, and what they cannot both be
weights      models without values, and the weights of a folder for a model that is prepared
accelerator  what a trainer goes on with, and what it takes over
record       a callback that records steps, for penstock report
resuming     the checkpoint that a run goes on from, the rows of its steps, the runs of its trackers
trainer      the mixin that stands before a trainer's class, and the class of both
"""

import transformers

from penstock.integrations import _private
from penstock.integrations._private.transformers import TESTED
from penstock.integrations.transformers.record import RecordCallback
from penstock.integrations.transformers.trainer import PenstockTrainerMixin, trainer_class
from penstock.integrations.transformers.weights import from_pretrained_on_meta

__all__ = ["PenstockTrainerMixin", "RecordCallback", "from_pretrained_on_meta", "trainer_class"]

_private.warn_untested("transformers", transformers.__version__, TESTED)
