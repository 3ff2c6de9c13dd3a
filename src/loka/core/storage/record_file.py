"""Records with a file of their own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from loka.core.storage.codec import decode, encode
from loka.core.storage.files import read_record, write_record


class RecordFile:
    """Abstract. A dataclass names its file: `class Plan(RecordFile, kind="loka-plan", version=2, way_out=...)`."""

    _file: ClassVar[tuple[str, int, str]]

    def __init_subclass__(cls, *, kind: str, version: int, way_out: str) -> None:
        super().__init_subclass__()
        cls._file = kind, version, way_out

    def save(self, path: Path | str) -> None:
        kind, version, _ = self._file
        write_record(Path(path), kind=kind, version=version, content=self.to_json())

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Raises FileRefused for a missing, truncated or edited file, and for what `from_json` refuses."""
        kind, version, way_out = cls._file
        return read_record(Path(path), kind=kind, version=version, way_out=way_out, parse=cls.from_json)

    def to_json(self) -> dict[str, Any]:
        """What `save` writes."""
        content: dict[str, Any] = encode(self)
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Raises LookupError, TypeError or ValueError for what `to_json` did not make."""
        return decode(cls, content)
