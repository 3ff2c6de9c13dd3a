"""Finding chains (core/chain.py): who reads whose output, seen in one forward pass.

    y = f(x) goes to g only  <=>  g's call is the one reader of y while the pass runs, and afterwards
                                  nobody holds y: it is not returned, and no Python object refers to it

Hooks on linear layers, norms and activations see those modules read. Every other reader shows as a
torch function with the tensor among its arguments, its shape or its address included: a
TorchFunctionMode sees them all but TorchScript, whose calls are watched as well. Tensors are
compared as objects, never by value. The trade-off: what reads a tensor without asking it anything
(a C++ extension that is handed the bare tensor) stays unseen.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from loka.core.chain import Chain
from loka.nn.chain_parts import Part, is_in_place, is_part, join
from loka.nn.fp8_linear import DTYPES, Fp8Linear
from loka.nn.linears import Filter, find_linears, is_prediction
from loka.nn.script_calls import script_calls
from loka.nn.unwrap import unwrap

# What a program may ask of a tensor without reading it. Not its shape: a view made with it
# would not fit where a chain runs as a whole.
_HARMLESS = {
    getattr(torch.Tensor, name).__get__
    for name in ("dtype", "device", "layout", "ndim", "requires_grad", "is_nested", "is_cuda", "is_sparse")
} | {torch.Tensor.dim, torch.Tensor.get_device, torch.Tensor.is_floating_point, torch.is_floating_point}
# No reading where they return the tensor itself.
_NO_OPS = {torch.Tensor.contiguous, torch.Tensor.flatten, torch.flatten}


@dataclass(eq=False, slots=True)
class _Call:
    """One call of a watched module. `state`: two calls under different ones cannot be one."""

    path: str
    module: nn.Module
    source: _Value | None = None
    value: _Value | None = None
    state: tuple[Any, ...] = ()
    in_place: bool = False
    broken: str = ""


@dataclass(eq=False, slots=True)
class _Value:
    """What a call returned, and who reads it. A module that works in place makes a new value of a tensor."""

    tensor: torch.Tensor
    call: _Call
    readers: list[_Call] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    @property
    def reader(self) -> _Call | None:
        """The call that alone reads it."""
        return self.readers[0] if len(self.readers) == 1 and not self.others else None


class Found(NamedTuple):
    """Chains in the order of the pass, chains of one included.

    `alone` says, for each linear layer that is in no chain with another one, why.
    """

    chains: tuple[Chain, ...]
    alone: dict[str, str]


def find_chains(model: nn.Module, *inputs: Any, **kwargs: Any) -> Found:
    """The chains of `model`, from one forward pass `model(*inputs, **kwargs)`.

    The pass runs eagerly and without gradients, in the mode (training or evaluation) the model is
    in. The model's buffers and the random generators are afterwards as they were.
    """
    inner = unwrap(model)
    kept = [*inner.buffers(), *(m.loka_health for m in inner.modules() if isinstance(m, Fp8Linear))]
    copies = [buffer.detach().clone() for buffer in kept]
    devices = {p.device.index for p in inner.parameters() if p.device.type == "cuda"}
    flow = Dataflow(model)
    with torch.random.fork_rng(devices=sorted(devices)), _eager(), torch.no_grad():
        flow.start()
        try:
            output = model(*inputs, **kwargs)
            return flow.finish(output)
        finally:
            flow.stop()
            for buffer, copy in zip(kept, copies, strict=True):
                buffer.copy_(copy)


class Dataflow(TorchFunctionMode):
    """Watches one forward pass: `start()`, the pass, `finish(its output)`; `stop()` if it failed.

    The pass must run eagerly. It computes what it would compute unwatched, bit for bit.
    `filter` leaves linear layers out, as everywhere.
    """

    def __init__(self, model: nn.Module, *, filter: Filter | None = None) -> None:
        super().__init__()
        self._root = unwrap(model)
        self._parts, self._alone = _parts(self._root, filter)
        self._handles: list[Any] = []
        self._calls: list[_Call] = []
        self._values: dict[int, _Value] = {}  # by the tensor's id; _calls keeps them all alive
        self._open: list[_Call] = []  # the watched module that is running
        self._inside = 0  # torch functions that are running
        self._thread = 0

    def start(self) -> None:
        """Attaches hooks: last before a call and first after it, so hooks of others are seen to read."""
        self._thread = threading.get_ident()
        for path, module in self._parts.items():
            self._handles += [
                module.register_forward_pre_hook(self._before(path), with_kwargs=True),
                module.register_forward_hook(self._after, prepend=True, always_call=True),
            ]
        # A wrapper may copy what the model inside returns.
        self._handles.append(self._root.register_forward_hook(self._returned))
        script_calls.add(self._read)
        _push_mode(self)

    def stop(self) -> None:
        """Detaches everything and forgets the pass; may be called twice."""
        for handle in self._handles:
            handle.remove()
        if self._thread:
            script_calls.discard(self._read)
            _remove_mode(self)
        self._handles, self._calls, self._open, self._values, self._thread = [], [], [], {}, 0

    def finish(self, output: Any) -> Found:
        """The chains of the pass that returned `output`. Also stops."""
        self._read("the caller, as the output", (output,))
        calls = self._calls
        self.stop()
        for value in _held([call.value for call in calls if call.value], self._root):
            value.others.append("an object that keeps it")
        silent = {path for path, module in self._parts.items() if isinstance(module, nn.Linear)}
        silent -= {call.path for call in calls}
        return _found(calls, {**self._alone, **dict.fromkeys(silent, "it is not called in this pass")})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._inside += 1
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            self._inside -= 1
        no_op = func in _HARMLESS or (func in _NO_OPS and bool(args) and result is args[0])
        if self._values and not no_op:
            self._read(getattr(func, "__name__", str(func)), (args, kwargs))
        return result

    def _read(self, who: str, arguments: Any) -> None:
        if self._open or threading.get_ident() != self._thread:
            return
        for tensor in _tensors(arguments):
            value = self._values.get(id(tensor))
            if value is not None:
                value.others.append(who)

    def _returned(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._read("the caller, as the output", (output,))

    def _before(self, path: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = _Call(path=path, module=module)
            self._calls.append(call)
            if threading.get_ident() != self._thread:
                call.broken = "it is called from another thread"
                return
            self._open.append(call)
            given = [*args, *kwargs.values()]
            with unseen():
                call.broken = _refuse(given)
                call.state = () if call.broken else _state(given[0])
            if self._inside:
                call.broken = "it is called inside a torch function"
            for tensor in _tensors(given):
                value = self._values.get(id(tensor))
                if value is not None:
                    value.readers.append(call)
                    call.source = value

        return before

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if threading.get_ident() != self._thread or not self._open or self._open[-1].module is not module:
            return
        call = self._open[-1]
        with unseen():
            call.broken = call.broken or _refuse([output])
        if isinstance(output, torch.Tensor):
            call.in_place = is_in_place(module)
            call.value = self._values[id(output)] = _Value(output, call)
        self._open.pop()


def unseen() -> contextlib.AbstractContextManager[None]:
    """Inside, tensors are read without anybody who watches the dataflow seeing it."""
    return torch._C.DisableTorchFunction()


def _parts(root: nn.Module, filter: Filter | None) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The modules that may be in a chain, and why each other linear layer is in none."""
    linears, alone = find_linears(root, filter=filter)
    paths: dict[nn.Module, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    everywhere = _foreign_hooks(vars(torch.nn.modules.module), "_global")
    parts = {}
    for module, found in paths.items():
        path, reason = found[0], None
        if path in linears and is_prediction(linears[path].out_features):
            reason = f"a prediction layer with {linears[path].out_features} outputs"
        elif len(found) > 1:
            reason = f"a shared module, at {', '.join(found)}"
        elif everywhere or _foreign_hooks(vars(module), ""):
            reason = "it has hooks that are not LoKA's"
        elif "forward" in vars(module):
            reason = "its forward was replaced"
        if reason and path in linears:
            alone[path] = reason
        elif not reason and (path in linears or is_part(module)):
            parts[path] = module
    return parts, alone


def _foreign_hooks(holder: dict[str, Any], prefix: str) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = (hook for kind in kinds for hook in (holder.get(prefix + kind) or {}).values())
    return any(not (getattr(hook, "__module__", None) or "").startswith("loka.") for hook in hooks)


def _refuse(given: list[Any]) -> str:
    """Why a module's arguments, or its output, are not one dense tensor of rows."""
    if len(given) != 1 or type(given[0]) not in (torch.Tensor, nn.Parameter):
        return "it takes or makes something else than one plain tensor"
    if given[0].layout is not torch.strided or given[0].is_nested or given[0].dtype not in DTYPES:
        return "its tensor is nested, sparse, or of a dtype that LoKA does not know"
    return "" if given[0].ndim else "its tensor has no dimension"


def _state(given: torch.Tensor) -> tuple[Any, ...]:
    """What has to be the same for modules that run as one: where, how many rows, and under what."""
    kind = given.device.type
    autocast = torch.is_autocast_enabled(kind)
    return (
        given.device,
        given.shape[:-1],
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype(kind) if autocast else None,
    )


def _tensors(content: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers, and in the attributes of what a model returns."""
    stack, seen = [content], set()
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple, set, frozenset, dict, slice)) and id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, dict):
                stack += item.values()
            else:
                stack += [item.start, item.stop, item.step] if isinstance(item, slice) else item


def _held(values: list[_Value], root: nn.Module) -> list[_Value]:
    """Those whose tensor some object keeps after the pass: it may read it at any time.

    The collector knows who refers to an object (0.1 us per live object, once). It does not look
    at what gc.freeze() set aside; of that, the model's own attributes are looked at here.
    """
    values = [value for value in values if value.reader]
    if not values:
        return []
    tensors = tuple(value.tensor for value in values)
    holders = [*gc.get_referrers(*tensors), *(vars(module) for module in root.modules())]
    holders += [item for module in root.modules() for item in vars(module).values() if _is_container(item)]
    held = {
        id(item)
        for holder in holders
        if holder is not tensors and not isinstance(holder, _Value) and not _is_our_frame(holder)
        for item in gc.get_referents(holder)
        if isinstance(item, torch.Tensor)
    }
    return [value for value in values if id(value.tensor) in held]


def _is_container(item: Any) -> bool:
    return isinstance(item, (list, tuple, dict, set))


def _is_our_frame(holder: Any) -> bool:
    return isinstance(holder, FrameType) and holder.f_code.co_filename == __file__


def _found(calls: list[_Call], alone: dict[str, str]) -> Found:
    counts = Counter(call.path for call in calls)
    good = {id(call) for call in calls if not call.broken and counts[call.path] == 1}
    following: dict[int, _Call] = {}
    for call in calls:
        reader = call.value.reader if call.value else None
        if reader is not None and {id(call), id(reader)} <= good and call.state == reader.state:
            following[id(call)] = reader
    heads = good - {id(call) for call in following.values()}
    drafts: list[tuple[Part, ...]] = []
    for call in calls:
        run: list[Part] = []
        at = call if id(call) in heads else None
        while at is not None:
            run.append(Part(path=at.path, module=at.module, in_place=at.in_place))
            at = following.get(id(at))
        drafts.append(tuple(run))
    chains = [chain for run in drafts for chain in join(run)]
    order = {call.path: index for index, call in enumerate(calls)}
    chains.sort(key=lambda chain: order[chain.paths[0]])
    return Found(tuple(chains), _why(chains, calls, counts, alone))


def _why(
    chains: Iterable[Chain], calls: list[_Call], counts: Counter[str], alone: dict[str, str]
) -> dict[str, str]:
    last = {call.path: call for call in calls}
    reasons = dict(alone)
    together = {link.path for chain in chains if len(chain.links) > 1 for link in chain.links}
    ends = {chain.name: chain.paths for chain in chains if len(chain.links) == 1}
    for path, call in last.items():
        if not isinstance(call.module, nn.Linear) or path in together:
            continue
        if counts[path] > 1:
            reasons[path] = f"it is called {counts[path]} times"
        elif call.broken:
            reasons[path] = call.broken
        else:
            first, final = last[ends[path][0]], last[ends[path][-1]]
            before = first.source
            came = f"its input is what {before.call.path} made: {_readers(before)}" if before else ""
            parts = [came, f"its output: {_readers(final.value)}" if final.value else ""]
            reasons[path] = "; ".join(part for part in parts if part)
    return reasons


def _readers(value: _Value) -> str:
    names = [f"module {call.path or 'itself'}" for call in value.readers] + value.others
    if not names:
        return "read by nobody"
    kept = list(dict.fromkeys(names))
    return f"read by {', '.join(kept[:4])}{' and more' if len(kept) > 4 else ''}"


def _remove_mode(mode: TorchFunctionMode) -> None:
    """From wherever it is in the stack: two probes of one model begin and end in the same order."""
    if any(other is mode for other in _get_current_function_mode_stack()):
        above = []
        while (top := _pop_mode()) is not mode:
            above.append(top)
        for other in reversed(above):
            _push_mode(other)


def _eager() -> contextlib.AbstractContextManager[Any]:
    """torch.compile stands aside; where it was never imported there is nothing to hold back."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")
