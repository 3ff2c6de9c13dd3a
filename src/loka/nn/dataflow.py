"""Finding chains (core/chain.py) and, with nn/cross_flow.py, stacks of cross layers: who reads whose output,
seen in one forward pass.

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
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from loka.core.chain import Chain
from loka.core.cross_record import CrossStack
from loka.nn.chain_parts import Part, is_in_place, is_part, join
from loka.nn.cross_flow import CrossPart, arguments_of, cross_parts, find_stacks, note_arguments
from loka.nn.linears import Filter, find_linears, is_prediction
from loka.nn.script_calls import script_calls
from loka.nn.site import sites_of
from loka.nn.unwrap import named_modules, unwrap
from loka.nn.watched import Call, Value, foreign_hooks, held, readers_of, refuse, state_of, tensors_in

# What a program may ask of a tensor without reading it. Not its shape: a view made with it
# would not fit where a chain runs as a whole.
_HARMLESS = {
    getattr(torch.Tensor, name).__get__
    for name in ("dtype", "device", "layout", "ndim", "requires_grad", "is_nested", "is_cuda", "is_sparse")
} | {torch.Tensor.dim, torch.Tensor.get_device, torch.Tensor.is_floating_point, torch.is_floating_point}
# No reading where they return the tensor itself.
_NO_OPS = {torch.Tensor.contiguous, torch.Tensor.flatten, torch.flatten}


class Found(NamedTuple):
    """Chains and stacks of cross layers in the order of the pass, those of one included.

    `alone` says, for each linear layer that is in no chain with another one and in no stack, why.
    """

    chains: tuple[Chain, ...]
    alone: dict[str, str]
    crosses: tuple[CrossStack, ...] = ()


def find_chains(model: nn.Module, *inputs: Any, **kwargs: Any) -> Found:
    """The chains of `model`, from one forward pass `model(*inputs, **kwargs)`.

    The pass runs eagerly and without gradients, in the mode (training or evaluation) the model is
    in. The model's buffers and the random generators are afterwards as they were.
    """
    inner = unwrap(model)
    kept = [*inner.buffers(), *(site.health for site in sites_of(inner).values())]
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
        linears, alone = find_linears(self._root, filter=filter)
        self._crosses = cross_parts(self._root, linears)
        self._parts, self._alone = _parts(self._root, linears, alone, self._crosses)
        self._handles: list[Any] = []
        self._calls: list[Call] = []
        self._values: dict[int, Value] = {}  # by the tensor's id; _calls keeps them all alive
        self._open: list[Call] = []  # the watched module that is running
        self._inside = 0  # torch functions that are running
        self._thread = 0

    def start(self) -> None:
        """Attaches hooks: last before a call and first after it, so hooks of others are seen to read."""
        self._thread = threading.get_ident()
        watched = {**self._parts, **{path: part.module for path, part in self._crosses.items()}}
        for path, module in watched.items():
            self._handles += [
                module.register_forward_pre_hook(self._before(path), with_kwargs=True),
                module.register_forward_hook(self._after, prepend=True, always_call=True),
            ]
        # A wrapper may copy what the model inside returns.
        self._handles.append(self._root.register_forward_hook(self._returned))
        script_calls.add(self._read)
        _push_mode(self)

    def stop(self, *, failing: nn.Module | None = None) -> None:
        """Detaches everything and forgets the pass; may be called twice.

        Called from a hook on a module whose forward failed, torch is just going through its hooks.
        Those on `failing` are then left to the next `stop()`; they do nothing.
        """
        self._handles = detach(self._handles, failing)
        if self._thread:
            script_calls.discard(self._read)
            _remove_mode(self)
        self._calls, self._open, self._values, self._thread = [], [], {}, 0

    def finish(self, output: Any) -> Found:
        """The chains of the pass that returned `output`. Also stops."""
        self._read("the caller, as the output", (output,))
        calls = self._calls
        self.stop()
        for value in held([call.value for call in calls if call.value], self._root):
            value.others.append("an object that keeps it")
        silent = {path for path, module in self._parts.items() if isinstance(module, nn.Linear)}
        silent -= {call.path for call in calls}
        crosses, apart = find_stacks(calls, self._crosses)
        alone = {**self._alone, **dict.fromkeys(silent, "it is not called in this pass"), **apart}
        chains, alone = _found([call for call in calls if call.path not in self._crosses], alone)
        return Found(chains, alone, crosses)

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
        for tensor in tensors_in(arguments):
            value = self._values.get(id(tensor))
            if value is not None:
                value.others.append(who)

    def _returned(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._read("the caller, as the output", (output,))

    def _before(self, path: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        cross = self._crosses.get(path)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = Call(path=path, module=module)
            self._calls.append(call)
            if threading.get_ident() != self._thread:
                call.broken = "it is called from another thread"
                return
            self._open.append(call)
            given = [*args, *kwargs.values()]
            arguments = arguments_of(cross.spec, args, kwargs) if cross else None
            source = arguments[1] if arguments else given[-1] if given else None
            with unseen():
                call.broken = note_arguments(call, arguments) if cross else refuse(given)
                call.state = state_of(source) if source is not None and not call.broken else ()
            if self._inside:
                call.broken = "it is called inside a torch function"
            for tensor in tensors_in(given):
                value = self._values.get(id(tensor))
                if value is not None:
                    value.readers.append(call)
                    if cross is None or tensor is source:
                        call.source = value

        return before

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if threading.get_ident() != self._thread or not self._open or self._open[-1].module is not module:
            return
        call = self._open[-1]
        with unseen():
            call.broken = call.broken or refuse([output])
        if isinstance(output, torch.Tensor):
            call.in_place = is_in_place(module)
            call.value = self._values[id(output)] = Value(output, call)
        self._open.pop()


def unseen() -> contextlib.AbstractContextManager[None]:
    """Inside, tensors are read without anybody who watches the dataflow seeing it."""
    return torch._C.DisableTorchFunction()


def detach(handles: Iterable[Any], failing: nn.Module | None) -> list[Any]:
    """Removes hooks, and returns those on `failing`: torch raises its own error where they go while it
    runs what `always_call` asks of a forward that failed."""
    left = []
    for handle in handles:
        if failing is not None and handle.hooks_dict_ref() is failing._forward_hooks:
            left.append(handle)
        else:
            handle.remove()
    return left


def _parts(
    root: nn.Module, linears: dict[str, nn.Linear], alone: dict[str, str], crosses: dict[str, CrossPart]
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The modules that may be in a chain, and why each other linear layer outside of `crosses` is in none."""
    crossed = {inner for part in crosses.values() for inner in part.module.modules()}
    paths: dict[nn.Module, list[str]] = {}
    for path, module in named_modules(root, once=False):
        paths.setdefault(module, []).append(path)
    everywhere = foreign_hooks(vars(torch.nn.modules.module), "_global")
    parts = {}
    for module, found in paths.items():
        path, reason = found[0], None
        if module in crossed:
            continue
        if path in linears and is_prediction(linears[path].out_features):
            reason = f"a prediction layer with {linears[path].out_features} outputs"
        elif len(found) > 1:
            reason = f"a shared module, at {', '.join(found)}"
        elif everywhere or foreign_hooks(vars(module), ""):
            reason = "it has hooks that are not LoKA's"
        elif vars(module).get("forward") is not vars(module).get("loka_forward"):  # a site's is ours
            reason = "its forward was replaced"
        if reason and path in linears:
            alone[path] = reason
        elif not reason and (path in linears or is_part(module)):
            parts[path] = module
    return parts, alone


def _found(calls: list[Call], alone: dict[str, str]) -> tuple[tuple[Chain, ...], dict[str, str]]:
    counts = Counter(call.path for call in calls)
    good = {id(call) for call in calls if not call.broken and counts[call.path] == 1}
    following: dict[int, Call] = {}
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
    return tuple(chains), _why(chains, calls, counts, alone)


def _why(
    chains: Iterable[Chain], calls: list[Call], counts: Counter[str], alone: dict[str, str]
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
            came = f"its input is what {before.call.path} made: {readers_of(before)}" if before else ""
            parts = [came, f"its output: {readers_of(final.value)}" if final.value else ""]
            reasons[path] = "; ".join(part for part in parts if part)
    return reasons


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
