"""Configurations of DeepSpeed and of accelerate (FSDP or DeepSpeed), read as arguments of `prepare`.

`convert_deepspeed` and `convert_accelerate` take what such a file holds, `convert_file` the file. Of every key they say
what became of it: nothing is dropped in silence.
"""

from penstock.integrations.convert.accelerate import convert_accelerate
from penstock.integrations.convert.converted import Converted, Note
from penstock.integrations.convert.deepspeed import convert_deepspeed
from penstock.integrations.convert.files import convert_file

__all__ = ["Converted", "Note", "convert_accelerate", "convert_deepspeed", "convert_file"]
