"""LoKA's pass over Inductor's joint graphs, and putting it among the user's.

The configuration is process-global: a pass of the user's stays and runs first, and ours acts on `loka::site`
alone. What it computes follows from the graph and from this package's code, so that caches may keep it; which of
cuBLASLt's algorithms computes it follows from times on the GPU, by whose name caches keep it.
"""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from loka.compiler.lower import join_sites
from loka.core.storage.files import PACKAGE, digest_of, digest_of_sources
from loka.kernels.gemm.adapters import cublaslt_c

log = logging.getLogger(__name__)


class RegionPass(CustomGraphPass):
    """Joins sites after `before`, the pass that was configured already."""

    def __init__(self, before: Any = None, *, search: bool = True) -> None:
        """`before`: the pass that the user configured, several of them in a list (torch 2.13), or None. `search`: as
        join_sites takes it."""
        self._search = search
        several = before if isinstance(before, list | tuple) else [before]
        self.before: list[Callable[[Graph], None]] = [each for each in several if each is not None]

    def __call__(self, graph: Graph) -> None:
        for each in self.before:
            each(graph)
        apart = join_sites(graph, search=self._search)
        for site, reason in apart.items():
            log.info("%s runs by itself: %s", site, reason)

    def uuid(self) -> Any | None:
        """A digest of the code. None, by which nothing is cached, where the pass of the user has no uuid."""
        theirs = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.before]
        return None if None in theirs else (*theirs, _digest())


@functools.cache
def _digest(package: Path = PACKAGE) -> str:
    """A digest of everything that decides what the pass writes: this package, the ops that it emits, and the versions,
    of cuBLASLt too, in whose order algorithms are numbered. torch keeps graphs without gradients by it and by what they
    were before the pass.
    """
    cublaslt = cublaslt_c.version() if cublaslt_c.why_missing() is None else None
    return digest_of([digest_of_sources("compiler", "kernels", package=package), torch.__version__, cublaslt])
