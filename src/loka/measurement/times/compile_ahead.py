"""Libraries that compile for each shape do it ahead, on all cores, not one shape after the other."""

from collections.abc import Iterable, Sequence

from loka.core.problem import Problem
from loka.core.progress import Track
from loka.core.records.report import HP
from loka.kernels.gemm.registry import candidate_named


def compile_ahead(problems: Sequence[Problem], names: Iterable[str], track: Track) -> None:
    """Compiles kernels for `problems`, of those candidates among `names` that compile for each shape. Needs the GPU.

    `track` is advanced as shapes are done, once for each kernel's library.
    """
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
