"""Where click rows come from: files that people have, and a synthetic world. Plain torch and numpy.

Start at `Source` in `batch.py`: everything here is one, or helps to make one. `pip install 'loka[data]'`
brings pyarrow for files; the synthetic source and npy files need nothing. `TableClicks` reads any table as it
is; `convert` prepares it once for `open_shards`, which reads in parallel, shuffles and scales.
"""

from loka.data.audit import Audit, Share, audit
from loka.data.batch import Batch, History, Source, at_epoch, history_of, tasks_of
from loka.data.categories.vocabulary import (
    HashedVocabulary,
    Vocabulary,
    build_vocabulary,
    hashed_vocabulary,
    read_vocabulary,
    vocabulary_from_dict,
    write_vocabulary,
)
from loka.data.conversion import Frequency, convert
from loka.data.dealing import Dealt
from loka.data.formats.npy import Triplet, npy_triplets, open_npy
from loka.data.formats.shards import Manifest, open_shards, read_manifest, split_shards
from loka.data.formats.table import TableClicks, open_table
from loka.data.generated.synthetic import SyntheticClicks
from loka.data.opening import open_rows
from loka.data.order import Shuffle
from loka.data.reader import Reader
from loka.data.schema import CRITEO, Schema

__all__ = [
    "CRITEO",
    "Audit",
    "Batch",
    "Dealt",
    "Frequency",
    "HashedVocabulary",
    "History",
    "Manifest",
    "Reader",
    "Schema",
    "Share",
    "Shuffle",
    "Source",
    "SyntheticClicks",
    "TableClicks",
    "Triplet",
    "Vocabulary",
    "at_epoch",
    "audit",
    "build_vocabulary",
    "convert",
    "hashed_vocabulary",
    "history_of",
    "npy_triplets",
    "open_npy",
    "open_rows",
    "open_shards",
    "open_table",
    "read_manifest",
    "read_vocabulary",
    "split_shards",
    "tasks_of",
    "vocabulary_from_dict",
    "write_vocabulary",
]
