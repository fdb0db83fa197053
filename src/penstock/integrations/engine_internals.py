"""What integrations and the command line take from inside the library: every such name, from here alone."""

from penstock.checkpoint.beside import batches
from penstock.checkpoint.folder import remove
from penstock.checkpoint.format import MARKER, encode
from penstock.checkpoint.pretrained import SCALE_DTYPE, base_name, codes_of, decoded, scales_of
from penstock.checkpoint.reader import Checkpoint, damaged_tiles, read_manifest, summarize
from penstock.checkpoint.save import check_shared
from penstock.checkpoint.tensorfiles import (
    DTYPES,
    INDEX,
    Forms,
    StoredTensors,
    TensorFile,
    TensorSpec,
    WeightFiles,
    divide,
    failed,
    index_of,
)
