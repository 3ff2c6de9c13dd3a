"""Fp8Linears that read one tensor, run as one (core/shared_input.py has what is computed).

    first layer     quantizes x once, [y_1, .., y_n] = x [W_1; ..; W_n]^T, keeps y_2 .. y_n
    the others      take what was kept for this very tensor

The user's own forward runs as before, module by module; parameters, names and `state_dict` stay. What was
kept is given out once, to a call with the same tensor, unchanged, under the same grad mode, autocast and
saved-tensor hooks, while the layer's weight is what it was. Anybody else computes by itself with the same
kernels, and gets the right result. Nothing stays: what nobody took goes with the input, and at the latest
when the module that holds the layers returns. In a compiled model, and of inference tensors, versions cannot
be asked for: one that is changed in place between two of the layers has to have been so while it was probed.

The weights are copied into one matrix in high precision first, as the gradients are: two passes that a
kernel with several sources could save. Whether the whole is faster than its parts is measured.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from loka.core.exceptions import NotConverted
from loka.core.report import HP
from loka.core.shared_input import SharedInput
from loka.nn.fp8_linear import Fp8Linear
from loka.nn.ops import linear_backward, linear_forward
from loka.nn.unwrap import unwrap

_ALIGNED = 16  # bytes
_MISSES = 8  # calls in a row of one layer that found nothing kept for it, until all run by themselves


@dataclass
class _Kept:
    """Outputs that wait for their layers, by place. `input` is the tensor that they belong to, or where no
    compiler watches a weak reference to it."""

    input: torch.Tensor | weakref.ref[torch.Tensor]
    state: tuple[Any, ...]
    weights: tuple[tuple[torch.Tensor, int], ...]
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)


class SharedRun:
    """A group of `layers` that runs as one; the first of them leads. Made by `share_input`.

    `together` and `alone` count calls of the layers in eager mode: by whom an output was computed.
    `apart`: the layers were called otherwise than planned for so long that they compute by themselves.
    """

    def __init__(self, group: SharedInput, layers: Sequence[Fp8Linear]) -> None:
        self.group = group
        self.layers = tuple(layers)
        self.together = self.alone = 0
        self.apart = False
        self._missed = [0] * len(layers)  # by place
        self._kept: _Kept | None = None

    def leads(self, layer: Fp8Linear) -> bool:
        """Whether `layer`, called now, is to compute for all of them."""
        first = self.layers[0]
        if layer is not first or self.apart:
            return False
        return all(_alike(other, first) for other in self.layers)

    def run(self, input: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The first layer's product [T, N_1] of `rows` [T, K], which are `input` as it is computed with."""
        first = self.layers[0]
        weights = tuple(layer.weight for layer in self.layers)
        training = torch.is_grad_enabled()
        keep = (training and any(w.requires_grad for w in weights), training and rows.requires_grad)
        branches = self.group.branches
        columns = tuple(None if branch.bias else not branch.dense for branch in branches)
        compiling = torch.compiler.is_compiling()
        how = (first.loka_candidates, keep, columns)
        outputs = SharedGemms.apply(rows, first.loka_health, how, None if compiling else self, *weights)
        kept = _Kept(
            input=input if compiling else weakref.ref(input, self._gone),
            state=_state(input, compiling),
            weights=tuple((w, 0 if compiling else _version(w)) for w in weights),
        )
        for place in range(1, len(outputs)):
            kept.outputs[place] = outputs[place]
        self._kept = kept
        if not compiling:
            self.together += 1
        return outputs[0]

    def take(self, layer: Fp8Linear, input: torch.Tensor) -> torch.Tensor | None:
        """What was computed for `layer` and this `input`; None: it has to compute by itself."""
        if layer is self.layers[0]:
            return None
        kept, compiling = self._kept, torch.compiler.is_compiling()
        place = self._place(layer)
        if kept is not None and place in kept.outputs and self._fits(kept, place, input, compiling):
            output = kept.outputs.pop(place)
            if not kept.outputs:
                self._kept = None
            if not compiling:
                self.together += 1
                self._missed[place] = 0
            return output
        if not compiling:
            self._note_miss(kept, place)
        return None

    def forget(self) -> None:
        """Lets go of what nobody has taken."""
        self._kept = None

    def dissolve(self) -> None:
        """The layers compute by themselves from now on; nothing of the group stays on them."""
        for layer in self.layers:
            layer.__dict__.pop("loka_shared", None)
            holder = layer.__dict__.pop("loka_holder", None)
            if holder is not None:
                holder.remove()
        self.forget()

    def _place(self, layer: Fp8Linear) -> int:
        for place, other in enumerate(self.layers):
            if other is layer:
                return place
        return -1  # a replica of a layer: its group is elsewhere

    def _fits(self, kept: _Kept, place: int, input: torch.Tensor, compiling: bool) -> bool:
        given = kept.input() if isinstance(kept.input, weakref.ref) else kept.input
        if given is not input:
            return False
        weight, version = kept.weights[place]
        same = compiling or (self.layers[place].weight is weight and _version(weight) == version)
        return same and kept.state == _state(input, compiling)

    def _note_miss(self, kept: _Kept | None, place: int) -> None:
        self.alone += 1
        if kept is None or place not in kept.outputs:
            return
        self._missed[place] += 1
        if self._missed[place] == _MISSES:
            self.apart = True
            self.forget()
            warnings.warn(
                f"{self.group.name} were planned as layers that share their input, and are called with "
                "different tensors, or under different states (grad mode, autocast, checkpoints); each "
                "computes by itself from now on. Probe and plan again as the model is used now",
                stacklevel=2,
            )

    def _gone(self, reference: Any) -> None:
        """The input of what is kept is gone: nobody can ask for it any more."""
        if self._kept is not None and self._kept.input is reference:
            self._kept = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}


def _alike(layer: Fp8Linear, first: Fp8Linear) -> bool:
    """Whether their weights can be one matrix, and their GEMMs are the same."""
    a, b = layer.weight, first.weight
    plain = type(a) in (nn.Parameter, torch.Tensor) and (a.dtype, a.device) == (b.dtype, b.device)
    return plain and layer.loka_candidates == first.loka_candidates


def _state(input: torch.Tensor, compiling: bool) -> tuple[Any, ...]:
    """What has to be the same for an output that one call computed and another one gives back."""
    kind = input.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    state = (torch.is_grad_enabled(), autocast, input.requires_grad)
    if compiling:  # versions and hooks cannot be asked for there
        return state
    # A checkpoint may compute one layer again without the other; another stream may not have waited for this.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    stream = torch.cuda.current_stream(input.device) if input.is_cuda else None
    return *state, torch.is_inference_mode_enabled(), _version(input), hooks, stream


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class SharedGemms(torch.autograd.Function):
    """y_1 .. y_n [T, N_i] = x [T, K] @ [W_1; ..; W_n]^T [N, K], in FP8 by three candidates."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        health: torch.Tensor,
        how: tuple[tuple[str, str, str], tuple[bool, bool], tuple[bool | None, ...]],
        run: SharedRun | None,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """`how`: the candidates; whether gradients of the weights and of x are wanted; which outputs may be
        columns, None for those that get a bias, which copies them. `run`: None where a compiler watches."""
        candidates, keep, columns = how
        _, grad_input, grad_weight = candidates
        share_x, share_weight = keep[0] and grad_weight != HP, keep[1] and grad_input != HP
        weight = torch.cat(weights)
        y, kept_x, x_scale, kept_weight, weight_scale = linear_forward(
            x, weight, health, *candidates, share_x, share_weight
        )
        saved_x = kept_x if share_x else x if keep[0] else x_scale
        saved_weights = [kept_weight] if share_weight else weights if keep[1] else [weight_scale]
        ctx.save_for_backward(saved_x, x_scale, weight_scale, *saved_weights)
        ctx.run = run
        ctx.health = health
        ctx.candidates = candidates
        ctx.widths = [w.shape[0] for w in weights]
        ctx.features = x.shape[1]
        ctx.weight_dtype = weight.dtype
        ctx.set_materialize_grads(False)
        return _columns(y, ctx.widths, columns, compiling=run is None)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        try:
            x, x_scale, weight_scale, *weights = ctx.saved_tensors
        except RuntimeError as error:
            if ctx.run is None:
                raise
            raise RuntimeError(
                f"{ctx.run.group.name} run as one and so have one backward, which ran already: call it "
                "for the sum of their losses, pass retain_graph=True to all but the last, or keep them apart "
                "with loka.Budget(keep=...)"
            ) from error
        if ctx.run is not None:  # a checkpoint that computed this layer again may not want the others
            ctx.run.forget()
        _, grad_input, grad_weight = ctx.candidates
        want_x = ctx.needs_input_grad[0]
        wanted = [
            want and grad is not None for want, grad in zip(ctx.needs_input_grad[4:], grads, strict=True)
        ]
        some = next((grad for grad in grads if grad is not None), None)
        if some is None or not (want_x or any(wanted)):
            return (None,) * (4 + len(grads))
        parts = [
            some.new_zeros(some.shape[0], width) if grad is None else grad
            for grad, width in zip(grads, ctx.widths, strict=True)
        ]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        dx, dw = linear_backward(
            torch.cat(parts, dim=1),
            x,
            x_scale,
            weight,
            weight_scale,
            ctx.health,
            grad_input,
            grad_weight,
            want_x,
            any(wanted),
            ctx.features,
            ctx.weight_dtype,
        )
        several = dw.split(ctx.widths) if any(wanted) else [None] * len(wanted)
        found = [part if want else None for part, want in zip(several, wanted, strict=True)]
        return (dx if want_x else None, None, None, None, *found)


def _columns(
    y: torch.Tensor, widths: Sequence[int], columns: Sequence[bool | None], *, compiling: bool
) -> tuple[torch.Tensor, ...]:
    """y [T, N] in parts [T, N_i]: its own columns, or copies of them.

    Columns that begin between 16 bytes are copied, too: what reads them would do so in small pieces. So are
    those of a compiled model, where the next graph may change one in place, and where what reads a copy
    makes it.
    """
    step, size, begin = sum(widths), y.element_size(), 0
    found = []
    for part, allowed in zip(y.split(list(widths), dim=1), columns, strict=True):
        aligned = step * size % _ALIGNED == 0 == begin * size % _ALIGNED
        begin += part.shape[1]
        copied = compiling or (allowed is not None and not (allowed and aligned))
        found.append(part.clone(memory_format=torch.contiguous_format) if copied else part)
    return tuple(found)


def share_input(model: nn.Module, group: SharedInput) -> SharedRun:
    """Makes the layers of `group`, which are Fp8Linears already, run as one, in place.

    Raises NotConverted where one is not there, is no Fp8Linear, shares already, or differs from the others in
    candidates, dtype or device, or where `output` is in high precision. Nothing was changed then.
    """
    modules = dict(unwrap(model).named_modules())
    layers = [modules.get(path) for path in group.linears]
    reasons = []
    for path, layer in zip(group.linears, layers, strict=True):
        if not isinstance(layer, Fp8Linear):
            reasons.append(f"{path} is a {type(layer).__name__}")
        elif layer.loka_shared is not None:
            reasons.append(f"{path} shares its input already")
        elif layer.in_features != group.in_features or layer.out_features != group.shapes[path].out_features:
            reasons.append(f"{path} is no longer {group.shapes[path]}")
    found = [layer for layer in layers if isinstance(layer, Fp8Linear)]
    if not reasons:
        reasons += [
            f"{path} differs from {group.linears[0]} in its kernels, dtype or device"
            for path, layer in zip(group.linears, found, strict=True)
            if not _alike(layer, found[0])
        ]
        if found[0].loka_candidates[0] == HP:
            reasons.append("their `output` is in high precision, so there is no quantized input to share")
    if reasons:
        raise NotConverted(
            f"{group.name} cannot share their input",
            why=reasons,
            way_out="revert the model first, or leave this group out of the plan",
        )
    run = SharedRun(group, found)
    holder = _holder(modules, group.linears)
    handle = None if holder is None else holder.register_forward_hook(_Returned(run))
    for layer in found:
        layer.loka_shared = run
    found[0].loka_holder = handle
    return run


@dataclass(frozen=True)
class _Returned:
    """A hook on the module that holds the layers."""

    run: SharedRun

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.run.forget()


def _holder(modules: dict[str, nn.Module], paths: Sequence[str]) -> nn.Module | None:
    """The innermost module around all of `paths` that is called; None where the first is the model itself."""
    names = [path.split(".")[:-1] for path in paths]
    depth = min(len(own) for own in names)
    while any(own[:depth] != names[0][:depth] for own in names):
        depth -= 1
    while isinstance(modules[".".join(names[0][:depth])], nn.ModuleList | nn.ModuleDict) and depth:
        depth -= 1
    return modules[".".join(names[0][:depth])]


def shared_runs(model: nn.Module) -> dict[str, SharedRun]:
    """The groups that run in `model`, by name."""
    runs = [m.loka_shared for m in unwrap(model).modules() if isinstance(m, Fp8Linear) and m.loka_shared]
    return {run.group.name: run for run in runs}
