"""A script that is launched: the same loop with accelerate's own accelerator, and with ours."""

import json
import sys
from pathlib import Path

from accelerate import Accelerator

from tests.integrations.accelerate_loops import PLACEMENTS, nlp_example

if __name__ == "__main__":
    theirs = nlp_example(None, epochs=1)
    ours = nlp_example({"placement": PLACEMENTS["cpu"]}, epochs=1)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    if accelerator.is_main_process:
        for name, record in (("theirs", theirs), ("ours", ours)):
            Path(sys.argv[1], f"{name}.json").write_text(json.dumps(record.losses + record.norms + record.rates))
    accelerator.end_training()
