"""`python -m penstock.train`: the command, until `penstock train` is this one."""

import os
import sys

from penstock.errors import PenstockError, one_line
from penstock.train import main

if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        sys.exit(main(sys.argv[1:]))
    except PenstockError as error:
        rank = os.environ.get("RANK", "0")
        who = "" if rank == "0" else f" [rank {rank}]"
        print(f"penstock{who}: error: {one_line(' '.join(str(error).split()), 2000)}", file=sys.stderr)
        sys.exit(2)
