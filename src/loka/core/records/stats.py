"""The record that the online half of Probe hands to the offline half.

For each linear layer it holds one `Distribution` per operand: sufficient statistics, no raw
tensors. A distribution is a kind with named tensors and numbers, so that a deeper probe adds
names and kinds, and readers ignore those they do not know; the record itself stays.
A saved `Stats` is a folder: `stats.json`, and one safetensors file that it names.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from loka.core.device import value_bytes
from loka.core.exceptions import LokaError, require_kind
from loka.core.numerics.effect import Effect
from loka.core.problem import DTYPES
from loka.core.records.coverage import Coverage
from loka.core.records.parts import Part
from loka.core.signature import ModelSignature
from loka.core.storage.codec import decode, encode, record, sparse
from loka.core.storage.files import (
    canonical,
    is_own_file,
    read_record,
    read_tensors,
    remove_unfinished,
    sha256_of_file,
    write_record,
    write_tensors,
    writing,
)

_KIND, _VERSION, RECORD = "loka-stats", 1, "stats.json"
_MOST_ROWS = 2**31 - 1  # of a GEMM: libraries count its sides in 32 bits
_WAY_OUT = "probe again, or use a copy of the folder; a running probe rewrites it at its next save"

OPERANDS = ("input", "weight", "grad_output")


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """What was learnt of one operand. `kind` says how to draw from it (statistics/draw.py)."""

    kind: str
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device | str) -> Distribution:
        return replace(self, tensors={name: tensor.to(device) for name, tensor in self.tensors.items()})


def _check(layer: LinearStats) -> None:
    if not {layer.dtype, layer.weight_dtype} <= set(DTYPES) or layer.rows < 0:
        raise ValueError("a dtype or a number of rows that cannot be")
    if not {"input", "weight"} <= set(layer.operands):
        raise ValueError("it lacks the statistics of its input or weight")


@record(ignore=frozenset({"turned"}), check=_check)
@dataclass(frozen=True, kw_only=True)
class LinearStats:
    """One linear layer: `rows` is the largest number of input rows in a call.

    `dtype` is the compute dtype its output had, `order` its place in the forward pass;
    without `needs_input_grad` (a first layer) its grad_input GEMM never runs, without
    `needs_weight_grad` (a frozen one) its grad_weight. `effects` is what quantizing its `output`
    GEMM alone costs the model, by recipe name (probe/model_effects/sensitivity.py); `no_effect` says why that
    is not known, or beside effects that the latest steps did not renew them. `effects_by_part` are the same
    of single tasks and segments of rows, by the part's name (core/records/parts.py). `over_tokens`: an input
    [B, d, n] lay as [B, n, d], so that the layer adds up tokens. `kept_weight`: it is served, with a weight
    that was quantized once, so that times hold the quantization of its input alone. `reads`: the layers whose
    outputs its input is made of, by code that a compiled region takes (probe/links.py).
    """

    rows: int
    calls: int
    order: int
    dtype: str
    weight_dtype: str
    needs_input_grad: bool
    needs_weight_grad: bool
    operands: Mapping[str, Distribution]
    effects: Mapping[str, Effect] = sparse(default_factory=dict)
    no_effect: str = sparse("")
    effects_by_part: Mapping[str, Mapping[str, Effect]] = sparse(default_factory=dict)
    over_tokens: bool = sparse(False)
    kept_weight: bool = sparse(False)
    reads: tuple[str, ...] = sparse(())

    def left_out(self) -> str:
        """Of how many rows there is no statistic, as they hold NaN or infinity; "" where there are none."""
        rows = [
            f"{bad} of {bad + int(learnt.numbers.get('count') or 0)} rows of {operand}"
            for operand, learnt in self.operands.items()
            if (bad := int(learnt.numbers.get("nonfinite_rows") or 0))
        ]
        return f"{', '.join(rows)} hold NaN or infinity: no statistic has them" if rows else ""


@record(ignore=None)  # what earlier versions noted of layers that feed each other
@dataclass(frozen=True, kw_only=True)
class Stats:
    """Statistics of a model. `skipped` says why a layer has none.

    `coverage` accounts for the matmul FLOPs of the first sampled step; None in statistics of before there was
    any. `final_rate` is the learning rate, as a share of its peak, of the model that effects are of; None
    where nobody said. `parts` are the tasks and segments of rows that have effects of their own, by name.
    `not_clicks` is why the loss of training may be of no clicks; "" where nothing speaks for that. `alike` is of
    all rows what `Part.alike` is of a part.
    """

    model: ModelSignature
    steps: int
    sampled_steps: int
    layers: Mapping[str, LinearStats]
    skipped: Mapping[str, str] = field(default_factory=dict)
    coverage: Coverage | None = sparse(None)
    final_rate: float | None = sparse(None)
    parts: Mapping[str, Part] = sparse(default_factory=dict)
    not_clicks: str = sparse("")
    alike: Mapping[str, Mapping[str, float]] = sparse(default_factory=dict)

    def digest(self) -> str:
        """Identifies the statistics; reports carry it so that a resumed measure checks it."""
        content, tensors = flatten(self)
        digest = hashlib.sha256(canonical(content))
        for name in sorted(tensors):
            digest.update(name.encode())
            digest.update(value_bytes(tensors[name]))
        return digest.hexdigest()

    def without_effect(self) -> dict[str, str]:
        """By reason, the sites that have no new effect on KL/H: their names, or "every site"."""
        found: dict[str, list[str]] = {}
        for path, layer in self.layers.items():
            if layer.no_effect:
                found.setdefault(layer.no_effect, []).append(path)
        every = len(self.layers)
        return {why: "every site" if len(paths) == every else ", ".join(paths) for why, paths in found.items()}

    def left_out(self) -> dict[str, str]:
        """By layer, of which rows there is no statistic."""
        return {path: rows for path, layer in self.layers.items() if (rows := layer.left_out())}

    def for_inference(self, *, batch: float = 1.0, kept_weights: bool = True) -> Stats:
        """The same statistics for serving: only `output` GEMMs, on `batch` times as many rows.

        What is measured from it are times and errors of a forward pass, so that a plan made of
        it fits a frozen model at that batch size, whose weights lie in the dtype it computes in:
        with float32 weights bf16 would cast them at every call, and look slower than it is.
        `kept_weights`: FP8 weights are quantized once, as `loka.serve.freeze` keeps them; False for a
        converted model that is called as it is, and quantizes them in each call.
        """
        require_kind(batch, Real, "batch", way_out="give a share of the probed rows, above 0")
        if not 0 < batch < math.inf:
            raise LokaError(f"batch is {batch}; it is a share of the probed rows, above 0")
        most = max((layer.rows for layer in self.layers.values()), default=0) * batch
        if most > _MOST_ROWS:
            raise LokaError(
                f"batch is {batch}: {most:.3g} rows, and no GEMM takes more than {_MOST_ROWS}",
                way_out="a share of the probed rows by which a batch has as many rows as requests bring",
            )
        layers = {
            path: replace(
                layer,
                rows=max(round(layer.rows * batch), 1),
                weight_dtype=layer.dtype,
                needs_input_grad=False,
                needs_weight_grad=False,
                kept_weight=kept_weights,
                operands={name: d for name, d in layer.operands.items() if name != "grad_output"},
            )
            for path, layer in self.layers.items()
        }
        return replace(self, layers=layers)

    def save(self, folder: Path | str) -> None:
        """Writes the folder so that a reader sees the old statistics or the new, never a mix.

        Raises NotWritten where the disk is full or refuses, or `folder` is a file.
        """
        folder = Path(folder)
        with writing(folder):
            self._save(folder)

    def _save(self, folder: Path) -> None:
        content, tensors = flatten(self)
        # The name carries the content: a reader of the old stats.json still finds its file.
        folder.mkdir(parents=True, exist_ok=True)
        staged = folder / "tensors.staged.safetensors"
        for name in (staged.name, RECORD):
            remove_unfinished(folder, name)
        write_tensors(staged, tensors)
        digest = sha256_of_file(staged)
        final = folder / f"tensors-{digest[:16]}.safetensors"
        staged.replace(final)
        content = {**content, "tensors": {"file": final.name, "sha256": digest}}
        write_record(folder / RECORD, kind=_KIND, version=_VERSION, content=content)
        for old in folder.glob("tensors-*.safetensors"):
            if old != final:
                old.unlink()

    @classmethod
    def load(cls, folder: Path | str) -> Stats:
        """Raises FileRefused for a missing, truncated or edited folder.

        What earlier versions noted of layers that feed each other (`chains`, `crosses`, `turned`) is dropped.
        """
        folder = Path(folder)

        def parse(content: dict[str, Any]) -> Stats:
            name = content["tensors"]["file"]
            if not is_own_file(name):
                raise ValueError(f"it names a file outside its folder: {name}")
            tensors = read_tensors(folder / name, sha256=content["tensors"]["sha256"], way_out=_WAY_OUT)
            return unflatten(content, tensors)

        record = folder / RECORD
        return read_record(record, kind=_KIND, version=_VERSION, way_out=_WAY_OUT, parse=parse)


def flatten(stats: Stats) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What goes into JSON, which has the names of tensors, and the tensors by "path/operand/name"."""
    tensors: dict[str, torch.Tensor] = {}
    layers = {}
    for path, layer in stats.layers.items():
        named: dict[str, Any] = {}
        for operand, found in layer.operands.items():
            tensors |= {f"{path}/{operand}/{name}": tensor for name, tensor in found.tensors.items()}
            named[operand] = {"kind": found.kind, "numbers": found.numbers, "tensors": sorted(found.tensors)}
        layers[path] = replace(layer, operands=named)
    return encode(replace(stats, layers=layers)), tensors


def unflatten(content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Stats:
    """Of what `flatten` made. Raises LookupError, TypeError or ValueError for anything else."""

    def restored(path: str, operand: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        numbers = decode(Mapping[str, float | None], entry["numbers"], at=f"layers.{path}.{operand}.numbers")
        named = {name: tensors[f"{path}/{operand}/{name}"] for name in entry["tensors"]}
        return {**entry, "numbers": numbers, "tensors": named}

    layers, named = {}, set()
    for path, layer in content["layers"].items():
        named |= {f"{path}/{o}/{name}" for o, entry in layer["operands"].items() for name in entry["tensors"]}
        operands = {operand: restored(path, operand, entry) for operand, entry in layer["operands"].items()}
        layers[path] = {**layer, "operands": operands}
    if strange := sorted(tensors.keys() - named):
        raise ValueError(f"no layer names the tensor {strange[0]}")
    return decode(Stats, {**content, "layers": layers})
