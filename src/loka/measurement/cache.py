"""Times once measured, on disk: the same problem on the same machine is not timed twice.

A key is everything a time depends on: the problems, the fingerprint of the machine, how finely
was timed, which candidates raced, and a digest of the sources that ran, so that an edited
kernel is timed again. The distribution of the operands is not in it: layers of one shape share
their times. One JSON record a key; a damaged one is measured again, and the report says so.
"""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loka.core.exceptions import FileRefused
from loka.core.storage.codec import decode, encode
from loka.core.storage.files import canonical, digest_of, digest_of_sources, read_record, write_record

_KIND, _VERSION = "loka-times", 1
_SOURCES = (
    "kernels",
    "compiler",
    "nn",
    "core/timing.py",
    "core/recording.py",
    "core/compiling.py",
    "core/numerics/reference.py",
    "core/recipe.py",
    "statistics/draw.py",
    "measurement/errors.py",
    "measurement/operands.py",
    "measurement/times",
)


def default_folder() -> Path:
    """Where the command line keeps times: $XDG_CACHE_HOME/loka/timings, or under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loka" / "timings"


@functools.cache
def sources_digest() -> str:
    return digest_of_sources(*_SOURCES)


class TimesCache:
    """Records by key, in memory for this measurement and in `folder` for the next.

    `notes` tells what was wrong with the folder; nothing about it stops a measurement.
    """

    def __init__(self, folder: Path | None) -> None:
        self.notes: list[str] = []
        self._folder = folder
        self._known: dict[str, Any] = {}

    def get(self, key: Mapping[str, Any], kind: Any) -> Any:
        digest = digest_of(key)
        if digest in self._known:
            return self._known[digest]
        if self._folder is None or not os.path.exists(self._file(self._folder, digest)):
            return None

        def checked(content: dict[str, Any]) -> Any:
            if canonical(content["key"]) != canonical(key):
                raise ValueError("it holds another key")
            return decode(kind, content["times"])

        file = self._file(self._folder, digest)
        try:
            found = read_record(file, kind=_KIND, version=_VERSION, way_out="", parse=checked)
        except FileRefused as error:
            self.notes.append(f"cached times were timed again: {error.what}: {'; '.join(error.why)}")
            return None
        self._known[digest] = found
        return found

    def put(self, key: Mapping[str, Any], times: Any) -> None:
        digest = digest_of(key)
        self._known[digest] = times
        if self._folder is None:
            return
        content = {"key": dict(key), "times": encode(times)}
        try:
            write_record(self._file(self._folder, digest), kind=_KIND, version=_VERSION, content=content)
        except OSError as error:
            self.notes.append(f"times are not cached in {self._folder}: {error.strerror or error}")
            self._folder = None

    @staticmethod
    def _file(folder: Path, digest: str) -> Path:
        return folder / f"{digest}.json"
