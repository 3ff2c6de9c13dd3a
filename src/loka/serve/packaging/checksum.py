"""The sha256 beside a package, which `sha256sum -c` reads: torch runs a damaged file, and answers otherwise, as it
looks at none of the checksums in the archive."""

from pathlib import Path

from loka.core.storage.files import file_behind, write_atomic


def checksum_of(package: Path) -> Path:
    """Where it lies."""
    return package.with_name(f"{package.name}.sha256")


def write_checksum(package: Path, sha256: str) -> None:
    """Beside a link, where it is looked for, and beside its file too. Raises NotWritten where the disk refuses."""
    for path in dict.fromkeys((file_behind(package), package)):
        write_atomic(checksum_of(path), f"{sha256}  {path.name}\n".encode())
