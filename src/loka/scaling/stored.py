"""Measurements that come with LoKA: what GEMMs took on a GPU in bf16 and in eight bits, by shape.

A file a GPU, `times/NAME.json.xz`, written by `shape_times` (benchmarks/README.md) from raw results, with where
they are from.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loka.core.device import Fingerprint
from loka.core.error import Estimate
from loka.core.exceptions import UnknownName
from loka.core.storage.codec import record, sparse
from loka.core.storage.record_file import RecordFile
from loka.scaling.surface import TOGETHER, Known, Shape, Surface, known

FOLDER = Path(__file__).parent / "times"

_MEASURE = (
    "measure there: `loka bench gemm` times the shapes of published models, `loka probe`, `loka measure` and "
    "`loka plan` your own"
)


@record(row=True)
@dataclass(frozen=True, kw_only=True)
class StoredGemm:
    """Microseconds of a GEMM in bf16, and that over the time of the fastest kernels in eight bits, operands
    quantized, by set of kernels ("all", "torch"); by itself, nothing shared."""

    bf16: Estimate
    gains: Mapping[str, Estimate]


@record(row=True)
@dataclass(frozen=True, kw_only=True)
class StoredLayer:
    """A linear layer.

    Attributes:
        gemms: by name.
        together: the gain of its three GEMMs, all in eight bits, which share the quantizing of each tensor,
            by set of kernels.
        by_sites: its speed-up as it was raced as a whole with what a plan chose for each GEMM, by set of
            kernels; 1 where the plan left all in bf16. Only of layers that were raced so.
    """

    rows: int
    in_features: int
    out_features: int
    weight_dtype: str
    gemms: Mapping[str, StoredGemm]
    together: Mapping[str, Estimate]
    by_sites: Mapping[str, Estimate] = sparse(default_factory=dict)

    def shape(self, kind: str) -> Shape:
        return Shape(
            kind=kind,
            rows=self.rows,
            in_features=self.in_features,
            out_features=self.out_features,
            weight_dtype=self.weight_dtype,
        )


@record(row=True)
@dataclass(frozen=True, kw_only=True)
class Source:
    """A raw result: its path and checksum (benchmarks/RAW.sha256), the command and the day that made it."""

    path: str
    sha256: str
    command: str
    date: str


@record(row=True)
@dataclass(frozen=True, kw_only=True)
class RegionGain:
    """A step, compiled, by plan in regions over compiled bf16 (benchmarks/regions)."""

    name: str
    speedup: Estimate


@dataclass(frozen=True, kw_only=True)
class StoredTimes(
    RecordFile, kind="loka-shape-times", version=1, way_out="install the package anew: the file comes with it"
):
    """What was measured on one GPU, and the constants by which it is carried to other shapes."""

    machine: Fingerprint
    sources: tuple[Source, ...]
    layers: tuple[StoredLayer, ...]
    bf16: Surface
    gains: Mapping[str, Surface]
    regions: tuple[RegionGain, ...]

    def bf16_points(self) -> dict[Shape, Estimate]:
        return {layer.shape(name): gemm.bf16 for layer in self.layers for name, gemm in layer.gemms.items()}

    def gain_points(self, kernels: str) -> dict[Shape, Estimate]:
        """Of single GEMMs, and of layers together."""
        found = {}
        for layer in self.layers:
            for name, gemm in layer.gemms.items():
                if kernels in gemm.gains:
                    found[layer.shape(name)] = gemm.gains[kernels]
            if kernels in layer.together:
                found[layer.shape(TOGETHER)] = layer.together[kernels]
        return found


def base_of(points: Mapping[Shape, Estimate], surface: Surface) -> Known:
    return known(list(points), [found.value for found in points.values()], surface)


def gpus() -> tuple[str, ...]:
    """The names of GPUs with stored measurements."""
    return tuple(sorted(path.name.removesuffix(".json.xz") for path in FOLDER.glob("*.json.xz")))


@functools.cache
def stored_times(gpu: str) -> StoredTimes:
    """Raises UnknownName for a GPU of which nothing is stored, FileRefused for a damaged file."""
    if gpu not in gpus():
        raise UnknownName(
            f"no measurements of GPU {gpu!r} come with LoKA, and none are guessed",
            way_out=f"one of {', '.join(gpus())}; or {_MEASURE}",
        )
    return StoredTimes.load(FOLDER / f"{gpu}.json.xz")
