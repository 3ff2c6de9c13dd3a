"""How many launches are made, by what launches: counted where it calls, on every device.

A CUDA graph's replay counts nothing: count while it is captured. On a CPU the same calls are counted
though nothing is launched, so that a test without a GPU can hold the number.
"""

from collections import Counter

_LAUNCHES: Counter[str] = Counter()


def note_launch(name: str) -> None:
    _LAUNCHES[name] += 1


def launches() -> dict[str, int]:
    """Since the last reset, of what regions launch: "edge", "gemm", "notes", and "weights", which stands for
    two launches."""
    return dict(_LAUNCHES)


def reset_launches() -> None:
    _LAUNCHES.clear()
