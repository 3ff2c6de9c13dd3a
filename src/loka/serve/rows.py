"""Requests and answers as rows: their form, padding to a bucket, slicing, and a digest.

A request is a tensor, a sequence of tensors (positional arguments) or a mapping (keyword arguments). Each tensor is [B,
...] with the same B. Padding repeats the last row, so that the model only computes with rows of a kind that it knows;
an empty request is padded with rows that fit its form.
"""

import copy
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from loka.core.device import moved, value_bytes
from loka.core.exceptions import ServeRefused
from loka.core.problem import dtype_name
from loka.core.storage.codec import sparse

Request = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]

Kind = Literal["tensor", "positional", "named"]

CHECK_ROWS = 4
MOST_PLACES = 4096
MOST_DRAWN = 256


@dataclass(frozen=True, kw_only=True)
class Column:
    """One input: its keyword or position, its dtype such as "float32", and its sides without the rows.

    `least`, `most`: what calibration rows hold at each place of a row, such as the ids of one table, NaN and
    infinity left out (inf, -inf where there is nothing else). Single numbers where rows have more than `MOST_PLACES`:
    all places, of floats those that vary, hold numbers on both sides of what lies between; none where they do not."""

    name: str
    dtype: str
    sides: tuple[int, ...]
    least: tuple[float, ...] = sparse(())
    most: tuple[float, ...] = sparse(())

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} [{', '.join(['B', *map(str, self.sides)])}]"


@dataclass(frozen=True, kw_only=True)
class Form:
    """The inputs that a frozen model is called with."""

    kind: Kind
    columns: tuple[Column, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {'; '.join(map(str, self.columns))}"

    def read(self, request: Request, device: torch.device) -> list[torch.Tensor]:
        """The tensors of a request in the order of `columns`, on `device`.

        Raises ServeRefused where it has another form, or tensors of unequal numbers of rows.
        """
        tensors = self._ordered(request)
        if tensors is None or not self._fits(tensors):
            raise ServeRefused(
                "this request is not of the form that was frozen",
                why=[f"given  {form_of(request)}", f"served {self}"],
                way_out="cast or reshape it, or freeze again with calibration rows of this form",
            )
        return [moved(tensor, device) for tensor in tensors]

    def _ordered(self, request: Request) -> Sequence[torch.Tensor] | None:
        if _kind(request) != self.kind:
            return None
        if self.kind == "tensor":
            return [request]  # type: ignore[list-item]
        if self.kind == "positional":
            return request if isinstance(request, (tuple, list)) else list(request)  # type: ignore[arg-type]
        named: Mapping[str, torch.Tensor] = request  # type: ignore[assignment]
        tensors = [named[column.name] for column in self.columns if column.name in named]
        return tensors if len(tensors) == len(named) else None

    @functools.cached_property
    def _expected(self) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        return tuple((getattr(torch, column.dtype), column.sides) for column in self.columns)

    def _fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the request has this form. It builds no Form of the request, which would take longer than queueing a
        small answer.
        """
        if len(tensors) != len(self.columns):
            return False
        rows: tuple[int, ...] | None = None
        for (dtype, sides), tensor in zip(self._expected, tensors, strict=True):
            if not _is_dense(tensor) or tensor.dtype is not dtype:
                return False
            shape = tensor.shape
            rows = shape[:1] if rows is None else rows
            if not rows or shape != (*rows, *sides):
                return False
        return True

    def call(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> Any:
        if self.kind == "named":
            return module(**{column.name: tensor for column, tensor in zip(self.columns, tensors, strict=True)})
        return module(*tensors)

    def check_rows(self, device: torch.device, count: int = CHECK_ROWS) -> list[torch.Tensor]:
        """`count` rows that every machine makes alike, within the bounds of the calibration rows: normal numbers, of
        which those beyond a bound are put within 1 of it, and integers.

        The GEMMs of the model are found with these rows, and a loaded server is compared with what was saved. From
        `MOST_DRAWN` rows on they repeat.
        """
        drawn = min(count, MOST_DRAWN)
        generator = torch.Generator().manual_seed(0)
        made = []
        for column in self.columns:
            dtype, shape = getattr(torch, column.dtype), (drawn, *column.sides)
            rows = torch.zeros(shape, dtype=dtype, device="cpu")
            if dtype.is_floating_point:
                wide = torch.float64 if dtype is torch.float64 else torch.float32
                rows = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(wide)
                if column.least:
                    rows = _put_between(rows, *_bounds(column, wide), generator)
                rows = rows.to(dtype)
            elif column.least:
                least, most = _bounds(column, torch.int64)
                share = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
                span = (most.double() - least.double() + 1).clamp(max=2.0**62)  # of hashes, what int64 can add
                rows = torch.minimum(least + (share * span).floor().long(), most).to(dtype)
            made.append((rows if drawn == count else rows[torch.arange(count, device="cpu") % drawn]).to(device))
        return made

    def bounded(self, batches: Sequence[Sequence[torch.Tensor]]) -> "Form":
        """This form, with the bounds of the numbers in these rows, of which there is at least one."""
        columns = [
            _bounded(column, [tensor for tensor in tensors if tensor.numel()])
            for column, tensors in zip(self.columns, zip(*batches, strict=True), strict=True)
        ]
        return replace(self, columns=tuple(columns))


def _bounded(column: Column, tensors: Sequence[torch.Tensor]) -> Column:
    if not tensors or tensors[0].is_complex():
        return column
    numbers = tensors[0].is_floating_point()
    places = [tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None] for tensor in tensors]
    places = [each.double() if numbers else each.long() for each in places]
    least = torch.stack([_finite(each, math.inf).amin(dim=0) for each in places]).amin(dim=0)
    most = torch.stack([_finite(each, -math.inf).amax(dim=0) for each in places]).amax(dim=0)
    if len(least) > MOST_PLACES:
        varied = least < most  # of floats: one place of padding would leave all rows alike
        chosen = varied if numbers and bool(varied.any()) else torch.ones_like(varied)
        low, high = least[chosen].max()[None], most[chosen].min()[None]
        if numbers and not bool(low < high):
            return column
        least, most = torch.minimum(low, high), high
    return replace(column, least=tuple(least.tolist()), most=tuple(most.tolist()))


def _finite(x: torch.Tensor, other: float) -> torch.Tensor:
    return torch.where(x.isfinite(), x, other) if x.is_floating_point() else x


def _bounds(column: Column, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    sides = column.sides if len(column.least) > 1 else [1] * len(column.sides)
    least, most = (torch.tensor(each, dtype=dtype, device="cpu").view(sides) for each in (column.least, column.most))
    return least, most


def _put_between(
    rows: torch.Tensor, least: torch.Tensor, most: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    free = least > most  # nothing finite was seen
    least, most = torch.where(free, -math.inf, least), torch.where(free, math.inf, most)
    inside = torch.minimum(torch.maximum(rows, least), most)
    if torch.equal(inside, rows):
        return rows
    share = torch.rand(rows.shape, generator=generator, dtype=torch.float32, device="cpu")
    step = share * (most - least).clamp(max=1.0)
    moved = torch.where(rows < least, least + step, torch.where(rows > most, most - step, rows))
    return torch.minimum(torch.maximum(moved, least), most)


def form_of(request: Request) -> Form:
    """The form of a request. Raises ServeRefused for what is no request at all."""
    kind, named = _kind(request), _named(request)
    if not named:
        raise ServeRefused("a request without a tensor", way_out="give the model's inputs, each [B, ...]")
    for name, tensor in named.items():
        if not _is_dense(tensor) or tensor.dim() == 0:
            raise ServeRefused(
                f"input {name} is no dense tensor with rows [B, ...]",
                why=[
                    f"it is of type {type(tensor).__name__}, layout {getattr(tensor, 'layout', 'none')}, "
                    f"on {getattr(tensor, 'device', 'no device')}"
                ],
                way_out="pad what is ragged, and keep constants in the model",
            )
    counts = {name: tensor.shape[0] for name, tensor in named.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise ServeRefused(f"inputs of unequal numbers of rows: {told}", way_out="one row each for a row")
    columns = tuple(
        Column(name=name, dtype=dtype_name(tensor.dtype), sides=tuple(tensor.shape[1:]))
        for name, tensor in named.items()
    )
    return Form(kind=kind, columns=columns)


def _is_dense(value: object) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return not value.is_nested and value.layout is torch.strided and not value.is_meta


def _kind(request: Request) -> Kind:
    if isinstance(request, torch.Tensor):
        return "tensor"
    if isinstance(request, (tuple, list)):  # before Mapping, which takes longer to ask
        return "positional"
    if not isinstance(request, Iterable):
        raise ServeRefused(f"a request is a {type(request).__name__}", way_out="tensors by place or by name")
    return "named" if isinstance(request, Mapping) else "positional"


def _named(request: Request) -> dict[str, torch.Tensor]:
    if isinstance(request, torch.Tensor):
        return {"0": request}
    if isinstance(request, Mapping):
        return dict(request)
    return {str(place): tensor for place, tensor in enumerate(request)}


def pad(tensors: Sequence[torch.Tensor], rows: int, form: Form) -> list[torch.Tensor]:
    """Each tensor [B, ...] as [rows, ...]: the last row is repeated, or for B = 0 a row that fits the form. The result
    is a copy, since a model may write to its inputs, and contiguous, as kernels round by how rows lie in memory.
    """
    count = tensors[0].shape[0]
    if count == rows:
        return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    last = form.check_rows(tensors[0].device) if count == 0 else tensors
    place = 0 if count == 0 else count - 1
    with _as_they_are(tensors):
        return [
            torch.cat([tensor, row[place : place + 1].expand(rows - count, *tensor.shape[1:])]).contiguous()
            for tensor, row in zip(tensors, last, strict=True)
        ]


def _as_they_are(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """Inside, a caller's autocast does not look at them: it refuses to join tensors of another half precision."""
    kind = tensors[0].device.type if tensors else "cpu"
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def mapped(output: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(output, torch.Tensor):
        return function(output)
    if isinstance(output, Mapping):
        parts_by_name = {key: mapped(value, function) for key, value in output.items()}
        if type(output) is dict or not isinstance(output, MutableMapping):
            return parts_by_name
        same = copy.copy(output)  # an OrderedDict, or a ModelOutput, whose entries are attributes too
        for key, value in parts_by_name.items():
            same[key] = value
        return same
    if isinstance(output, (tuple, list)):
        parts = [mapped(value, function) for value in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    raise ServeRefused(
        f"the model returns a {type(output).__name__}",
        way_out="return tensors [B, ...], or tuples, lists and dicts of them",
    )


def leaves(output: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(output, note)
    return found


def names(output: Any, within: str = "") -> list[str]:
    """A name for each leaf, in order: its key or place, such as "heads.clicks"; "0" for a tensor by itself."""
    if isinstance(output, torch.Tensor):
        return [within or "0"]
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        parts: Iterable[tuple[Any, Any]] = zip(output._fields, output, strict=True)
    else:
        parts = output.items() if isinstance(output, Mapping) else enumerate(output)
    return [name for key, part in parts for name in names(part, f"{within}.{key}" if within else str(key))]


def joined(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(leaves(part) for part in parts), strict=True)
    with _as_they_are(leaves(parts[0])):
        whole = iter([torch.cat(column) for column in columns])
    return mapped(parts[0], lambda _: next(whole))


def digest(batches: Iterable[Sequence[torch.Tensor]]) -> str:
    """sha256 of the values of all tensors, with dtypes and shapes."""
    found = hashlib.sha256()
    for batch in batches:
        for tensor in batch:
            found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            found.update(value_bytes(tensor))
    return found.hexdigest()
