"""Watches one forward pass for sites: every GEMM with a parameter, whoever calls it.

A function mode sees the calls (graph/gemm_calls.py), hooks say in whose forward they stand, and each site
gets its name: the module's path where its own `weight` multiplies, else the parameter's with the view, and
`#2` for a further GEMM of the same. It computes what would be computed unwatched, bit for bit.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._ops import HigherOrderOperator
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

from loka.core.exceptions import LokaError
from loka.core.records.coverage import Coverage
from loka.core.signature import LinearShape, WeightUse, child_path
from loka.graph.checkpoints import keep_sites, watching
from loka.graph.flops import FlopAccount, site_flops
from loka.graph.gemm_calls import GemmCall
from loka.graph.parameters import ParameterMode
from loka.graph.views import name_of
from loka.nn.linears import Filter, unsupported_weight
from loka.nn.site import LAYOUTS
from loka.nn.unwrap import named_modules, named_parameters, unwrap
from loka.probe.tensor_hooks import TensorHooks
from loka.probe.trace import unseen


class SiteCall(NamedTuple):
    """One site in one call: x [.., K], weight [N, K]; `rows` brings the output or its gradient to [.., N]."""

    path: str
    x: torch.Tensor
    weight: torch.Tensor
    rows: Callable[[torch.Tensor], torch.Tensor]


Observer = Callable[[SiteCall, torch.Tensor], None]


class SiteNames:
    """Names of sites by where they stand; they stay the same over all steps of a probe.

    `layers` are the sites seen so far that are no linear layer's own call, of which `traced` were seen before.
    """

    def __init__(self, linears: dict[str, nn.Linear], traced: dict[str, LinearShape]) -> None:
        self._names = {WeightUse(caller=p, key=_weight(p), form="linear"): p for p in linears}
        self._names |= {shape.use: path for path, shape in traced.items() if shape.use is not None}
        self._taken = {*linears, *traced}
        self.layers = dict(traced)

    def name(self, use: WeightUse, own: Callable[[str], bool]) -> str:
        """`own`: whether a parameter's name is that of its module's `weight`."""
        if use not in self._names:
            base = _display(name_of(use.key), own)
            name, count = base, 1
            while self._stacked(name, use) in self._taken:
                count += 1
                name = f"{base}#{count}"
            self._names[use] = self._stacked(name, use)
            self._taken.add(self._names[use])
        return self._names[use]

    @staticmethod
    def _stacked(name: str, use: WeightUse) -> str:
        return name if use.expert is None else f"{name}[{use.expert}]"


def _weight(path: str) -> str:
    return f"{path}.weight" if path else "weight"


def _display(key: str, own: Callable[[str], bool]) -> str:
    return key.removesuffix("weight").removesuffix(".") if own(key) and key != "weight" else key


class SiteTrace(ParameterMode):
    """`start()`, one forward pass of the model, `stop()`.

    Args:
        root: the user's module, without wrappers.
        names: of its sites.
        linears: the linear layers that are sites, by path.
        filter: (module, name) -> whether to look at a site; the module is the one that calls.
        observe: is given each site's call and what the call returned.
        account: whether the FLOPs of this pass are counted.
        hooks: learns of hooks that the pass puts on tensors.
        begun: False where a wrapper's forward has begun, and not yet the root's.
    """

    watches = True

    def __init__(
        self,
        root: nn.Module,
        names: SiteNames,
        *,
        linears: dict[str, nn.Linear],
        filter: Filter | None,
        observe: Observer,
        account: bool,
        hooks: TensorHooks | None = None,
        begun: bool = True,
    ) -> None:
        super().__init__([])
        self.again = watching
        self._linears = linears
        self._root, self._names, self._filter, self._observe = root, names, filter, observe
        self._hooks = hooks or TensorHooks()
        self._paths = {module: path for path, module in named_modules(root)}
        self._by_id: dict[int, tuple[torch.Tensor, str]] = {}
        self._stack: list[nn.Module] = [root]
        self._handles: list[Any] = []
        self._inside = 0
        self._level = _transforms()
        self._outside = not begun  # of the root's forward
        self._thread = 0
        self.site_flops: dict[str, dict[str, float]] = {}
        self.skipped: dict[str, str] = {}
        parameters = self._of_model()
        self.account = FlopAccount(parameters, self._place) if account else None

    def start(self) -> None:
        self._thread = threading.get_ident()
        keep_sites()
        for module in self._paths:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            self._handles.append(module.register_forward_pre_hook(self._enter))
            # Before the module's own hooks: what they multiply runs behind its forward, in its caller's.
            self._handles.append(module.register_forward_hook(self._leave, prepend=True, always_call=True))
        if self.account is not None:
            self.account.__enter__()
        _push_mode(self)

    def stop(self) -> list[Any]:
        if self in _get_current_function_mode_stack():
            aside = []
            while (mode := _pop_mode()) is not self:
                aside.append(mode)
            for mode in reversed(aside):
                _push_mode(mode)
            if self.account is not None:
                self.account.__exit__(None, None, None)
        handles, self._handles = self._handles, []
        self._by_id = {}
        return handles

    def is_elsewhere(self) -> bool:
        """Whether the thread that asks is another than that of the pass: it calls the same modules with their hooks."""
        return threading.get_ident() != self._thread

    def coverage(self) -> Coverage | None:
        """Of this pass and its backward; None where it was not accounted."""
        if self.account is None:
            return None
        return Coverage(sites=self.site_flops, uncovered=self.account.uncovered())

    def key_of(self, tensor: Any) -> str | None:
        known = self._by_id.get(id(tensor))
        return known[1] if known is not None and known[0] is tensor else None

    def note(self, tensor: torch.Tensor, key: str) -> None:
        self._by_id[id(tensor)] = (tensor, key)

    def multiply(self, key: str, call: GemmCall, func: Any, args: Any, kwargs: Any) -> Any:
        if self._inside:  # a call inside of a call, as a composite function's
            return func(*args, **kwargs)
        sites = self._sites(key, call)
        if not sites:
            return func(*args, **kwargs)
        # Neither the GEMM's own kernels nor what watching it computes are among the FLOPs to account for.
        with self.account.site() if self.account is not None else contextlib.nullcontext():
            self._inside += 1
            try:
                out = func(*args, **kwargs)
            finally:
                self._inside -= 1
            for site in sites:
                with unseen():
                    self._count(site, out)
                self._observe(site, out)
            # Of a view, an in-place op behind the GEMM makes another graph node, past the hooks on gradients.
            return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() and out.requires_grad else out

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        caller = self._stack[-1]
        if func is F.linear and self._paths.get(caller) in self._linears and self.key_of(args[1]) is None:
            self.note(args[1], _weight(self._paths[caller]))  # computed, by a parametrization say
        if isinstance(func, HigherOrderOperator):  # torch compiles it where nothing looks on, and else drops gradients
            raise LokaError(
                f"a Probe cannot look into `{func.name()}`, which {self._place()[0] or 'the model'} calls",
                way_out="write it in Python for the probed steps (an `if` for torch.cond, scaled_dot_product_attention "
                "for flex_attention), or probe the parts of the model that call none",
            )
        out = super().__torch_function__(func, types, args, kwargs)
        self._hooks.see(func, args, lambda: self._place()[0])
        return out

    def _sites(self, key: str, call: GemmCall) -> list[SiteCall]:
        caller = self._stack[-1]
        place = self._paths[caller]
        own = call.form == "linear" and place in self._linears and _is_weight_of(caller, call.source)
        if reason := self._unread(call.x):
            self.skipped[place if own else _display(name_of(key), self._is_own_weight)] = reason
            return []
        experts = [None] if call.weight.dim() == 2 else list(range(call.weight.shape[0]))
        found = []
        for expert in experts:
            use = WeightUse(caller=place, key=key, form=call.form, expert=expert)
            if own:
                found.append(SiteCall(place, call.x, call.weight, call.rows))
                continue
            name = self._names.name(use, self._is_own_weight)
            reason = self._refused(name, caller, call)
            if reason:
                self.skipped[name] = reason
                continue
            weight = call.weight if expert is None else call.weight[expert]
            rows = call.rows if expert is None else _of_expert(call.rows, expert)
            self._names.layers.setdefault(name, _shape(weight, call.bias is not None, use))
            found.append(SiteCall(name, call.x if expert is None else call.x[expert], weight, rows))
        return found

    def _unread(self, x: torch.Tensor) -> str:
        """Why no rows can be read of this input, nor a site run on it; "" where they can."""
        if _transforms() > self._level:
            return (
                "called inside of a transform that the model applies (torch.func, vmap, forward-mode AD), where no "
                "site runs in FP8"
            )
        if self._outside:
            return "called by a hook of the whole model, outside of every forward in which a site could run"
        if x.layout not in LAYOUTS:
            return f"its input is sparse ({x.layout}), and kernels read rows of numbers"
        return ""

    def _refused(self, name: str, caller: nn.Module, call: GemmCall) -> str:
        if self._filter is not None and not self._filter(caller, name):
            return "left out by the filter"
        return unsupported_weight(call.source.dtype, tuple(call.weight.shape))

    def _count(self, site: SiteCall, out: torch.Tensor) -> None:
        n, k = site.weight.shape
        flops = site_flops(site.x.numel() // max(k, 1), k, n)
        counts = self.site_flops.setdefault(site.path, {})
        wanted = {"output": True, "grad_input": site.x.requires_grad, "grad_weight": site.weight.requires_grad}
        for gemm, runs in wanted.items():
            if runs and (gemm == "output" or out.requires_grad):
                counts[gemm] = counts.get(gemm, 0.0) + flops

    def _is_own_weight(self, key: str) -> bool:
        path, _, name = key.rpartition(".")
        return name == "weight" and any(known == path for known in self._paths.values())

    def _place(self) -> tuple[str, str]:
        module = self._stack[-1]
        return self._paths.get(module, ""), type(module).__name__

    def _of_model(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for name, parameter in named_parameters(self._root):
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                continue  # of a lazy module, which has its parameters once it was called
            if parameter.dim() > 1:
                self.note(parameter, name)
            found.append(parameter)
        return found

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.is_elsewhere():
            return
        if module is self._root and self._outside:
            self._outside = False
        else:
            self._stack.append(module)
        # FSDP has put gathered parameters in by now, into lists and layers that are never called too.
        for holder in (module, *map(unwrap, module.children())):
            for name, parameter in holder._parameters.items():
                self._note_held(holder, name, parameter)

    def _note_held(self, holder: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or parameter.dim() < 2 or self.key_of(parameter) is not None:
            return
        path = self._paths[holder]
        self.note(parameter, child_path(path, name))
        if self.account is not None:
            self.account.know(parameter)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._stack[-1] is not module or self.is_elsewhere():
            return
        if len(self._stack) > 1:
            self._stack.pop()
        else:
            self._outside = True


def _transforms() -> int:
    """How many transforms of torch.func and forward-mode AD are active. Those around the whole step are the user's way
    to take gradients, and hide no numbers; `refuse_sampling` has the one that does."""
    return (torch._C._functorch.maybe_current_level() or 0) + forward_ad._current_level


def _is_weight_of(module: nn.Module, source: torch.Tensor) -> bool:
    """Whether `source` is the module's own weight; one that is computed is another tensor at each access."""
    own = module._parameters.get("weight")
    return own is None or own is source


def _shape(weight: torch.Tensor, bias: bool, use: WeightUse) -> LinearShape:
    return LinearShape(in_features=weight.shape[1], out_features=weight.shape[0], bias=bias, use=use)


def _of_expert(rows: Callable[[torch.Tensor], torch.Tensor], expert: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda out: rows(out)[expert]
