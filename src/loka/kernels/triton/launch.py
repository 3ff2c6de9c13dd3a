"""Launching the same kernels again at a fraction of the host's time.

Triton binds and inspects every argument at every launch, which costs the host more than many of our kernels
take on the device. What it compiles for depends on dtypes, on the alignment of addresses and on integers.
So a function that only allocates and launches is run once under a `Recording`, and from then on, for
arguments alike in all of these, its allocations and launches are made again with the addresses of the day.
Where these come again too, the launches are one CUDA graph (graphs.py).
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from loka.core.device import on_device_of
from loka.kernels.triton.driver import zero
from loka.kernels.triton.graphs import launch_kept
from loka.kernels.triton.pack import INTERPRETED

_ALIGNMENT = 16  # bytes; triton tells addresses apart by it
_PIECE = 256  # bytes; to what a slot of the scratch is aligned, as CUDA aligns what it allocates
_MOST = 8192  # recordings kept; a ragged batch makes many


def cdiv(a: int, b: int) -> int:
    """triton.cdiv is a constexpr function, which costs the host 6 us."""
    return -(-a // b)


def launching_on(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the operand's."""
    return _HERE if _local.traced else on_device_of(tensor)


_HERE = contextlib.nullcontext()


class _Allocation(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool
    bytes: int


class _Launch(NamedTuple):
    """`pointers`: place among the values, slot of the tensor, bytes behind its start."""

    run: Any
    function: Any
    metadata: Any
    grid: tuple[int, int]
    values: tuple[Any, ...]
    pointers: tuple[tuple[int, int, int], ...]


class _Operand(NamedTuple):
    """A view of a slot's tensor, or of scratch: bytes behind its start, and how it lies."""

    slot: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Call(NamedTuple):
    function: Callable[..., None]
    operands: tuple[_Operand, ...]


class Recording:
    """Allocations and launches of one call. Slots are the given tensors, then what was allocated.

    What the call's result is made of is allocated anew at every replay; all else lies in one piece of memory.
    """

    def __init__(self, given: tuple[torch.Tensor | None, ...]) -> None:
        self.given = len(given)
        self.allocations: list[_Allocation] = []
        self.steps: list[_Launch | _Call] = []
        self._tensors: list[torch.Tensor | None] = list(given)
        self._returned: set[int] = set()

    def note_allocation(self, tensor: torch.Tensor, *, zeroed: bool) -> None:
        size, stride, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        self.allocations.append(_Allocation(size, stride, dtype, zeroed, tensor.untyped_storage().nbytes()))
        self._tensors.append(tensor)

    def note_launch(self, compiled: Any, grid: tuple[int, int], args: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        pointers = [(place, *self._slot(a)) for place, a in enumerate(args) if isinstance(a, torch.Tensor)]
        plain = tuple(0 if isinstance(a, torch.Tensor) else a for a in args)
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        self.steps.append(_Launch(run, function, metadata, grid, (*plain, *values), tuple(pointers)))

    def note_call(self, function: Callable[..., None], tensors: tuple[torch.Tensor, ...]) -> None:
        operands = (_Operand(*self._slot(t), tuple(t.shape), t.stride(), t.dtype) for t in tensors)
        self.steps.append(_Call(function, tuple(operands)))

    def slot_of(self, tensor: torch.Tensor) -> int:
        """That of a tensor of the result."""
        slot, offset = self._slot(tensor)
        assert offset == 0
        self._returned.add(slot)
        return slot

    def _slot(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Its slot and the bytes behind that one's start: of the same address, else inside an allocation."""
        address = tensor.data_ptr()
        for slot, known in enumerate(self._tensors):
            if known is not None and known.data_ptr() == address:
                return slot, 0
        for slot, known in enumerate(self._tensors[self.given :], self.given):
            assert known is not None
            if known.data_ptr() < address < known.data_ptr() + known.untyped_storage().nbytes():
                return slot, address - known.data_ptr()
        raise AssertionError("a kernel was launched on a tensor that is neither given nor recorded")

    def close(self) -> None:
        """Lets go of the tensors of the recorded call; says where each slot lies in the scratch, zeros first."""
        self._tensors = []
        slots = enumerate(self.allocations, self.given)
        scratch = sorted((not made.zeroed, slot, made.bytes) for slot, made in slots if slot not in self._returned)
        self._places: dict[int, int] = {}
        self._scratch = self._zeros = 0  # bytes
        for full, slot, size in scratch:
            self._places[slot] = self._scratch
            self._scratch += cdiv(size, _PIECE) * _PIECE
            if not full:
                self._zeros = self._scratch
        zeroed = [slot for slot, made in enumerate(self.allocations, self.given) if made.zeroed]
        self._zeroed = [(slot, self.allocations[slot - self.given].bytes) for slot in zeroed if slot in self._returned]
        self._several = len(self.steps) + bool(self._zeros) + len(self._zeroed) > 1

    def replay(
        self, given: tuple[torch.Tensor | None, ...], addresses: list[int], device: torch.device
    ) -> list[torch.Tensor | None]:
        """Makes them again; returns the tensors by slot, None for scratch. `addresses`: of what is given."""
        tensors = list(given)
        scratch = torch.empty(self._scratch, dtype=torch.uint8, device=device) if self._scratch else None
        start = 0 if scratch is None else scratch.data_ptr()
        for slot, made in enumerate(self.allocations, self.given):
            place = self._places.get(slot)
            if place is not None:
                tensors.append(None)
                addresses.append(start + place)
                continue
            tensor = torch.empty_strided(made.size, made.stride, dtype=made.dtype, device=device)
            tensors.append(tensor)
            addresses.append(tensor.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        launches = functools.partial(self._launch, tensors, scratch, addresses)
        if self._several:
            launch_kept((self, stream, start, *addresses), launches, stream, device.index)
        else:
            launches(stream)
        return tensors

    def _launch(
        self, tensors: list[torch.Tensor | None], scratch: torch.Tensor | None, addresses: list[int], stream: int
    ) -> None:
        if self._zeros:
            assert scratch is not None
            zero(scratch.data_ptr(), self._zeros, stream)
        for slot, size in self._zeroed:
            zero(addresses[slot], size, stream)
        for step in self.steps:
            if isinstance(step, _Call):
                step.function(*(self._lying(tensors, scratch, operand) for operand in step.operands))
                continue
            values = list(step.values)
            for place, slot, offset in step.pointers:
                values[place] = addresses[slot] + offset
            step.run(*step.grid, 1, stream, step.function, step.metadata, None, None, None, *values)

    def _lying(
        self, tensors: list[torch.Tensor | None], scratch: torch.Tensor | None, operand: _Operand
    ) -> torch.Tensor:
        tensor, offset = tensors[operand.slot], operand.offset
        if tensor is None:
            assert scratch is not None
            tensor, offset = scratch.view(operand.dtype), offset + self._places[operand.slot]
        assert tensor.dtype == operand.dtype, "a call took an operand as numbers of another type than it has"
        if offset == 0 and tensor.shape == operand.size and tensor.stride() == operand.stride:
            return tensor
        start = tensor.storage_offset() + offset // tensor.element_size()
        return tensor.as_strided(operand.size, operand.stride, start)


class _Local(threading.local):
    recording: Recording | None = None
    traced: bool = False


_local = _Local()


@contextlib.contextmanager
def traced_launches() -> Iterator[None]:
    """Inside, launches of this thread become nodes of the graph that `make_fx` writes: for a file that runs
    without LoKA."""
    _local.traced = True
    try:
        yield
    finally:
        _local.traced = False


def launches_are_traced() -> bool:
    return _local.traced


_RECORDINGS: dict[Any, tuple[Recording, Any]] = {}


def recorded(
    key: tuple[Any, ...],
    given: tuple[torch.Tensor | None, ...],
    make: Callable[[], Any],
    keep: Callable[[Any, Recording], Any],
    rebuild: Callable[[Any, list[torch.Tensor | None]], Any],
) -> Any:
    """`make()`, or for a key seen before its allocations and launches made again.

    Args:
        key: all that `make` depends on but the addresses and contents of `given`. (Which of these lie at one
            address, and how addresses are aligned, is told apart here.)
        keep: what to remember of a result: which slots it is made of.
        rebuild: the result from that and the tensors by slot.
    """
    if _local.recording is not None:  # a part of a call that is recorded as a whole
        return make()
    device = given[0].device if given[0] is not None else torch.device("cuda")
    addresses = [-1 if tensor is None else tensor.data_ptr() for tensor in given]
    # A recording tells tensors apart by their addresses.
    lying = [(addresses.index(address), address % _ALIGNMENT) for address in addresses]
    full = (*key, device.index, *lying)
    known = _RECORDINGS.get(full)
    if known is not None:
        return rebuild(known[1], known[0].replay(given, addresses, device))
    recording = Recording(given)
    _local.recording = recording
    try:
        result = make()
    finally:
        _local.recording = None
    if len(_RECORDINGS) >= _MOST:
        _RECORDINGS.clear()
    kept = keep(result, recording)
    recording.close()
    _RECORDINGS[full] = (recording, kept)
    return result


def allocated(tensor: torch.Tensor, *, zeroed: bool = False) -> torch.Tensor:
    """`tensor`, just allocated; a recording allocates its like."""
    if _local.recording is not None:
        _local.recording.note_allocation(tensor, zeroed=zeroed)
    return tensor


def call(function: Callable[..., None], *tensors: torch.Tensor) -> None:
    """`function(*tensors)`, which launches on the current stream. A recording calls it again, on tensors that lie alike
    at other addresses, and may keep the launches for these."""
    function(*tensors)
    if _local.recording is not None:
        _local.recording.note_call(function, tensors)


def launch(
    kernel: Any,
    grid: tuple[int, int],
    args: tuple[Any, ...],
    constants: dict[str, Any],
    num_warps: int = 4,
    **options: int,
) -> None:
    """`kernel[grid](*args, **constants, num_warps=..., ...)`; `args` are tensors and integers, in order."""
    if _local.traced:
        torch.library.wrap_triton(kernel)[grid](*args, **constants, num_warps=num_warps, **options)
        return
    compiled = kernel[grid](*args, **constants, num_warps=num_warps, **options)
    if _local.recording is not None and not INTERPRETED:
        values = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        _local.recording.note_launch(compiled, grid, args, values)
