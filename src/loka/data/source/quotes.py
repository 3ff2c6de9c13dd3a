"""A row of text is a line, so a quoted value ends on the line where it began.

Parsers of CSV let a quoted value go on over line ends. One stray quote then takes in every line up to the
next one, and rows are gone that nobody counts. Here a line whose quotes do not close is a malformed line.
"""

import re
from functools import lru_cache

_QUOTE = b'"'


def line_count(block: bytes) -> int:
    """The lines of a block, each ended by "\\n", "\\r\\n" or "\\r", or by the end of the block."""
    ends = block.count(b"\n") + block.count(b"\r") - block.count(b"\r\n")
    return ends + (not block.endswith((b"\n", b"\r")))


def without_open_quotes(block: bytes, separator: str) -> bytes:
    """The same number of lines, ended by "\\n"; those whose quotes do not close are empty."""
    if _QUOTE not in block:
        return block
    closed = _closed(separator)
    lines = re.split(rb"\r\n|\n|\r", block)
    kept = [b"" if _QUOTE in line and not closed.fullmatch(line) else line for line in lines]
    if lines[-1] and not kept[-1]:
        kept.append(b"")  # it lacked the end that makes a line of it
    return b"\n".join(kept)


def ends_open(block: bytes, separator: str) -> bool:
    """Whether a quote is open at the end of the block, if none was before its last line."""
    line = block.rstrip(b"\r\n")
    line = line[max(line.rfind(b"\n"), line.rfind(b"\r")) + 1 :]
    return _QUOTE in line and not _closed(separator).fullmatch(line)


@lru_cache(maxsize=16)
def _closed(separator: str) -> re.Pattern[bytes]:
    """Fields between separators, each begun by a quote that closes or by none.

    As pyarrow's parser has it: a quote opens only where a field begins, two in a quoted value are one, and
    what follows the closing one up to the separator is taken as it is.
    """
    sep = re.escape(separator.encode())
    # No possessive quantifiers, which Python before 3.11.4 gets wrong. Nothing here matches in two ways.
    field = rb'(?:"[^"]*(?:""[^"]*)*"(?!")|(?!"))[^' + sep + rb"]*"
    return re.compile(field + rb"(?:" + sep + field + rb")*", re.DOTALL)
