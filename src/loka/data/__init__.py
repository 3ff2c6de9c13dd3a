"""Where click rows come from: files that people have, and a synthetic world. Plain torch and numpy.

Start at `Source` in `batch.py`: everything here is one, or helps to make one. `pip install 'loka[data]'`
brings pyarrow for files; the synthetic source needs nothing.
"""

from loka.data.batch import Batch, Source
from loka.data.schema import CRITEO, Schema
from loka.data.synthetic import SyntheticClicks
from loka.data.table import TableClicks, open_table
from loka.data.vocabulary import (
    HashedVocabulary,
    Vocabulary,
    build_vocabulary,
    hashed_vocabulary,
    vocabulary_from_dict,
)

__all__ = [
    "CRITEO",
    "Batch",
    "HashedVocabulary",
    "Schema",
    "Source",
    "SyntheticClicks",
    "TableClicks",
    "Vocabulary",
    "build_vocabulary",
    "hashed_vocabulary",
    "open_table",
    "vocabulary_from_dict",
]
