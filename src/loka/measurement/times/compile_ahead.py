"""Libraries that compile for each shape do it ahead, on all cores, not one shape after the other."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from loka.core.problem import Problem
from loka.core.records.report import HP
from loka.kernels.gemm.registry import candidate_named

T = TypeVar("T")
Track = Callable[[Iterable[T], str, int], Iterable[T]]
"""(items, description, total) -> the same items; a place for a progress bar."""


def untracked(items: Iterable[T], description: str, total: int) -> Iterable[T]:
    return items


def compile_ahead(problems: Sequence[Problem], names: Iterable[str], track: Track) -> None:
    """Compiles `problems` for those of the candidates `names` whose kernels can. Needs the GPU."""
    if not problems:
        return
    kernels = {name: candidate_named(name).kernel for name in names if name != HP}
    for kernel in {kernel.name: kernel for kernel in kernels.values()}.values():
        if kernel.precompile is None or kernel.missing():
            continue
        done = iter(track(range(len(problems)), f"compiling {kernel.name}", len(problems)))

        def tick(done: Iterable[int] = done) -> None:
            next(iter(done), None)

        kernel.precompile(problems, tick)
        tick()  # the bar ends
