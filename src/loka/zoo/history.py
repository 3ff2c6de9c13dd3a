"""Histories, of which each row has one: the ids of one feature of its past events, oldest first.

    sequence [B, L] int64, padded on the right with id 0;   lengths [B] int64, 0 <= length <= L

What lies past a row's length is never read, so padding changes nothing. Sources say with
`loka.data.History` what ids they hold; this says in which table a model looks them up.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HistoryTable:
    """Where the ids of a sequence are looked up; give one of the two.

    Attributes:
        column: the sparse feature whose ids they are, such as the item's; both share its table.
        vocab_size: the ids are of no sparse feature and have a table of their own, of this size.
    """

    column: int | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if (self.column is None) == (self.vocab_size is None):
            raise ValueError(f"{self}: give either `column` or `vocab_size`")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"{self}: a vocabulary has at least one id, the padding's")

    def place(self, vocab_sizes: Sequence[int]) -> int:
        """The index of its table: that of its column, or the one after the sparse features'."""
        if self.column is None:
            return len(vocab_sizes)
        if not 0 <= self.column < len(vocab_sizes):
            raise ValueError(f"{self}: there are {len(vocab_sizes)} sparse features, counted from 0")
        return self.column
