"""Plain-text tables: the one way a record prints itself."""

import re
from collections.abc import Iterable, Sequence


def format_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns aligned left, numbers right, two spaces apart, trailing space removed."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max([len(title), *(len(row[index]) for row in cells)]) for index, title in enumerate(header)]
    numeric = [bool(cells) and all(_is_number(row[index]) for row in cells) for index in range(len(header))]

    def line(row: Sequence[str]) -> str:
        parts = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        return "  ".join(parts).rstrip()

    return "\n".join([line(list(header)), *(line(row) for row in cells)])


def _is_number(cell: str) -> bool:
    return cell in ("", "-") or re.fullmatch(r"[+-]?\d+(\.\d+)?x?", cell) is not None
