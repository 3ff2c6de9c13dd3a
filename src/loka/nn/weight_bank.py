"""The weight bank: FP8 copies of all weights of a model, made once per optimizer step in one launch.

    row = fp8(W / scale) [N16, K16]        turned = row^T [K16, N16]

`output` reads the rows, `grad_input` the turned copy (Hopper's FP8 tensor cores take K-major
operands only). Sides are padded with zeros to multiples of 16. Scales are delayed, from the scale
book: the quantizing launch needs no maximum first, and notes the one that it meets.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from loka.core.exceptions import LokaError
from loka.core.problem import round_up
from loka.kernels.book import Batch, Entry, batches, quantize_bank
from loka.nn.scale_book import ScaleBook

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


class WeightBank:
    """Copies of `weights` [N, K] in bf16, fp16 or fp32, of any strides; slots from `first_slot` on.

    The copies' addresses stay for as long as a weight's shape and device do. The bank holds the
    parameters that it was given: one that a module replaces later by another object (as
    load_state_dict(assign=True) does) is not seen.

    Raises ValueError for weights of another rank or dtype, without elements, on another device
    than the book, or with more weights than slots.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], book: ScaleBook, first_slot: int = 0) -> None:
        self.weights = dict(weights)
        self.book = book
        self._slots = {name: first_slot + place for place, name in enumerate(self.weights)}
        if first_slot < 0 or first_slot + len(self.weights) > len(book.slots):
            raise ValueError(
                f"{len(self.weights)} weights from slot {first_slot} on do not fit "
                f"into a scale book of {len(book.slots)} slots"
            )
        self._copies: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._batches: tuple[Batch, ...] = ()
        self._placed: tuple[object, ...] = ()  # where the weights lay when the tables were built
        self._versions: tuple[int, ...] | None = None  # of the scales and weights that the copies show
        self._replayed = False
        self._forgotten = False
        _check(self.weights, book)
        self._make_copies()

    def row(self, name: str) -> torch.Tensor:
        """e4m3 [N16, K16], row-major; what `refresh` last wrote."""
        return self._copies[name][0]

    def turned(self, name: str) -> torch.Tensor:
        """e4m3 [K16, N16], row-major: the transpose of `row`."""
        return self._copies[name][1]

    def slot(self, name: str) -> int:
        return self._slots[name]

    def scale(self, name: str) -> torch.Tensor:
        """float32 [1], of both copies unless `stale()`: an update of the book moves it, not them."""
        return self.book.scale(self._slots[name])

    def stale(self) -> bool:
        """Whether weights or scales may have changed since the last `refresh`; no work on the device.

        Scales change with every update of the book, whether the weights did or not (a skipped
        optimizer step). For weights it goes by addresses, shapes, strides, optimizer steps of this
        process and versions, which in-place operations on a parameter raise. They do not where the
        operation is on `parameter.data`, or a collective's: call `forget` then. While a CUDA graph
        is captured the answer is True, so that the graph holds a refresh of its own. From then on it
        stays True, for a replayed graph changes weights without raising versions; unless whoever
        replays it says so every time (`announced_replays`, `note_step`).
        """
        return capturing(self.book.device) or self.changed()

    def changed(self) -> bool:
        """As `stale`, but a capture alone is no reason: for graphs in which weights stay as they are."""
        if self._replayed or self._versions is None:
            return True
        return self._versions != self._read_versions() or self._placed != self._read_places()

    def note_replay(self) -> None:
        """A CUDA graph that changes the weights exists: their versions say nothing any more."""
        self._replayed = True

    def forget(self) -> None:
        """The next refresh takes its scales from the weights as they are then (they may have jumped)."""
        self._forgotten = True
        self._versions = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantizes every weight with its slot's scale as it is: one launch for each weight dtype.

        Weights whose slots are not primed are primed first, and tables are built where addresses
        changed: the first refresh synchronizes, the following ones do not.

        Raises LokaError where either would be needed while a CUDA graph is captured, and
        ValueError where weights or book moved to devices that differ.
        """
        places = self._read_places()
        priming = [
            name for name, slot in self._slots.items() if self._forgotten or not self.book.primed(slot)
        ]
        moved = places != self._placed
        if capturing(self.book.device):
            if priming or moved:
                raise LokaError(
                    "the weight bank cannot be refreshed inside this CUDA graph capture",
                    why=[
                        "the weights moved, or never were quantized: their table must be copied first"
                        if moved
                        else f"no scale is known for {', '.join(priming)}"
                    ],
                    way_out="run one step (or call refresh) outside the capture, then capture",
                )
            if not _announced:
                self.note_replay()
        if moved:
            _check(self.weights, self.book)
            self._make_copies()
            self._batches = batches(
                [
                    Entry(weight.detach(), *self._copies[name], self._slots[name])
                    for name, weight in self.weights.items()
                ]
            )
            self._placed = places
        for name in priming:
            self.book.prime(self._slots[name], _amax(self.weights[name]))
        self._forgotten = False
        # What a capture records has not run yet, and never will where the capture fails.
        self._versions = None if capturing(self.book.device) else self._read_versions()
        for batch in self._batches:
            quantize_bank(batch, self.book.buffers, counting=self.book.counting)

    def _make_copies(self) -> None:
        """Copies that fit stay: CUDA graphs and saved pointers know their addresses."""
        for name, weight in self.weights.items():
            rows, columns = (round_up(side, 16) for side in weight.shape)
            kept = self._copies.get(name)
            if kept and kept[0].shape == (rows, columns) and kept[0].device == weight.device:
                continue
            with torch.inference_mode(mode=False):
                self._copies[name] = (
                    torch.zeros(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device),
                    torch.zeros(columns, rows, dtype=torch.float8_e4m3fn, device=weight.device),
                )

    def _read_places(self) -> tuple[object, ...]:
        return tuple(
            (weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, weight.device)
            for weight in self.weights.values()
        )

    def _read_versions(self) -> tuple[int, ...] | None:
        """None, which is never current, where a weight was made in inference mode and has no version."""
        if any(weight.is_inference() for weight in self.weights.values()):
            return None
        # Fused optimizers do not raise versions (torch 2.13: foreach=True does, fused=True does not).
        return (
            self.book.moves,
            _optimizer_steps()[0],
            *(weight._version for weight in self.weights.values()),
        )

    def __getstate__(self) -> dict[str, Any]:
        """What a copy starts from: its tables would name this bank's addresses, so it has none, and no
        FP8 copies either, which the first refresh makes.

        Nor does a graph that changes these weights change the copy's.
        """
        return {
            **self.__dict__,
            "_copies": {},
            "_batches": (),
            "_placed": (),
            "_versions": None,
            "_replayed": False,
        }


_announced: list[bool] = []


@contextlib.contextmanager
def announced_replays() -> Iterator[None]:
    """Around a capture of a graph each of whose replays will be followed by `note_step`."""
    _announced.append(True)
    try:
        yield
    finally:
        _announced.pop()


def note_step() -> None:
    """Weights changed without a version or a step of an optimizer to show it: a graph was replayed."""
    _optimizer_steps()[0] += 1


@functools.cache
def _optimizer_steps() -> list[int]:
    """[steps that optimizers of this process took since the first call], counted by a hook."""
    steps = [0]

    def count(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        steps[0] += 1

    register_optimizer_step_post_hook(count)
    return steps


def _check(weights: Mapping[str, torch.Tensor], book: ScaleBook) -> None:
    for name, weight in weights.items():
        if weight.dim() != 2 or weight.numel() == 0 or weight.dtype not in _DTYPES:
            raise ValueError(
                f"{name} is {weight.dtype} {list(weight.shape)}; the weight bank takes matrices "
                f"with elements in {', '.join(_DTYPES.values())}: leave it out"
            )
        if weight.device != book.device:
            raise ValueError(
                f"{name} is on {weight.device}, its scales are on {book.device}; "
                "move both: model.to(device) and book.to(device)"
            )


def _amax(weight: torch.Tensor) -> torch.Tensor:
    """max |W| without a copy of W; NaN where W has one."""
    return torch.linalg.vector_norm(weight.detach(), ord=torch.inf)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
