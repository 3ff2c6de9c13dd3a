"""A stack of cross layers that was formed in a model: its places in the model's scale book and weight bank.

Copies that forward keeps for backward were written under the scales of that moment, and a second
forward may move the book's before backward comes. So forward works with a copy of the scales, and
keeps it for its backward: one launch for the whole stack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from loka.core.chain_recipe import ChainRecipe
from loka.core.cross_record import CrossStack
from loka.core.problem import target_of
from loka.core.recipe import Format, Gemm
from loka.core.report import site_name
from loka.kernels.producer import row_units
from loka.nn.cross_match import CrossSpec
from loka.nn.cross_serving import ServedLayer, served_layers
from loka.nn.cross_stack import CrossLayer, CrossState, Delayed, LowWeight, Weights, Where, multiply_by
from loka.nn.scale_book import Slot

if TYPE_CHECKING:
    from loka.nn.chain_state import ChainState, RunningChain


@dataclass(frozen=True, kw_only=True)
class Formed:
    """What forms a stack: `specs` are of its cross layers, `kernels` by site."""

    stack: CrossStack
    recipe: ChainRecipe
    kernels: Mapping[str, str]
    specs: tuple[CrossSpec, ...]


@dataclass(frozen=True, kw_only=True)
class LayerSlots:
    """Of x_l, du_l, and at low rank v_l and dv_l; gradients in units."""

    x: int
    grad_outer: int
    inner: int | None = None
    grad_inner: int | None = None


@dataclass(kw_only=True, eq=False)
class RunningCross:
    """`modules` are the linear layers by path; `place` is that of its unit in the book.

    `reader` is the chain that may be served with the stack, and `between` are the modules whose hooks
    would see that (nn/handover.py).
    """

    formed: Formed
    modules: Mapping[str, nn.Module]
    place: int
    slots: tuple[LayerSlots, ...]
    state: ChainState = field(repr=False)
    reader: RunningChain | None = field(default=None, repr=False)
    between: tuple[nn.Module, ...] = field(default=(), repr=False)
    _served: dict[tuple[torch.dtype, str], tuple[ServedLayer, ...] | None] = field(
        default_factory=dict, repr=False
    )

    @property
    def stack(self) -> CrossStack:
        return self.formed.stack

    @property
    def recipe(self) -> ChainRecipe:
        return self.formed.recipe

    def linear(self, path: str) -> nn.Linear:
        found = self.modules[path]
        assert isinstance(found, nn.Linear)
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        return {path: self.linear(path).weight for path in self.stack.linears}

    def parameters(self) -> list[torch.Tensor]:
        """Of each layer: v's weight, u's weight, u's bias; absent ones left out."""
        found: list[torch.Tensor] = []
        for path in self.stack.linears:
            linear = self.linear(path)
            found += [linear.weight, *([] if linear.bias is None else [linear.bias])]
        return found

    def _named(self, where: Where, gemm: Gemm) -> str:
        """The kernel of a GEMM that is about to run, which counts as a run."""
        layer = self.stack.layers[where[0]]
        path = layer.u if where[1] == "u" else layer.v
        assert path is not None
        site = site_name(path, gemm)
        self.state.runs[site] += 1
        return self.formed.kernels[site]

    def served(self, dtype: torch.dtype, device: torch.device) -> tuple[ServedLayer, ...] | None:
        """How it is served on this device, by layer; None: as it is trained."""
        place = dtype, target_of(device)
        if place not in self._served:
            formed = self.formed
            self._served[place] = served_layers(
                formed.stack, formed.recipe, formed.kernels, dtype=dtype, target=place[1]
            )
        return self._served[place]

    def forward_state(self, kept: torch.Tensor) -> CrossState:
        """Of training: `kept` are the book's scales, from `ScaleBook.keep`. What is seen moves the book's."""
        return self._cross_state(lambda slot: self._delayed(slot, kept))

    def backward_state(self, kept: torch.Tensor | None) -> CrossState:
        """`kept`: the scales that forward worked with. None, for serving: the book's as they are."""
        return self._cross_state(lambda slot: Delayed(scale=self.state.book.scale(slot, kept)))

    def _cross_state(self, operand: Callable[[int], Delayed]) -> CrossState:
        layers = []
        for layer, slots in zip(self.stack.layers, self.slots, strict=True):
            layers.append(
                CrossLayer(
                    u=self._low(layer.u),
                    x=operand(slots.x),
                    grad_outer=self._delayed(slots.grad_outer),
                    v=None if layer.v is None else self._low(layer.v),
                    inner=None if slots.inner is None else operand(slots.inner),
                    grad_inner=None if slots.grad_inner is None else self._delayed(slots.grad_inner),
                )
            )
        largest = self.state.book.unit(self.place)
        return CrossState(layers=tuple(layers), largest=largest, multiply=multiply_by(self._named))

    def _delayed(self, slot: int, kept: torch.Tensor | None = None) -> Delayed:
        book = self.state.book
        return Delayed(scale=book.scale(slot, kept), seen=book.seen(slot), counts=book.counted(slot))

    def _low(self, path: str) -> LowWeight:
        bank = self.state.bank
        return LowWeight(row=bank.row(path), turned=bank.turned(path), scale=bank.scale(path))

    @torch.no_grad()
    def prime_inputs(self, x0: torch.Tensor, x: torch.Tensor, weights: Weights) -> None:
        """Before the first forward: maxima of all x_l and v_l, from a forward in float32."""
        book = self.state.book
        if all(
            book.primed(slot) for slots in self.slots for slot in (slots.x, slots.inner) if slot is not None
        ):
            return
        x0, x = x0.float(), x.float()
        for layer, slots, (v, u) in zip(self.stack.layers, self.slots, weights, strict=True):
            book.prime(slots.x, x.abs().amax())
            inner = x
            if v is not None:
                inner = x @ v.float().t()
                assert slots.inner is not None
                book.prime(slots.inner, inner.abs().amax())
            outer = inner @ u.float().t()
            bias = self.linear(layer.u).bias
            x = x0 * (outer if bias is None else outer + bias.float()) + x

    @torch.no_grad()
    def prime_gradients(self, grad: torch.Tensor, x0: torch.Tensor, weights: Weights) -> None:
        """Before the first backward: maxima of all du_l and dv_l in units, from a backward in float32."""
        book = self.state.book
        if all(book.primed(slots.grad_outer) for slots in self.slots):
            return
        units, _ = row_units(grad, torch.zeros_like(book.unit(self.place)))
        flow = grad.float() * torch.where(units == 0, 0.0, units.reciprocal()).view(-1, 1)
        x0 = x0.float()
        for slots, (v, u) in zip(reversed(self.slots), reversed(weights), strict=True):
            du = flow * x0
            book.prime(slots.grad_outer, du.abs().amax())
            down = du @ u.float()
            if v is not None:
                assert slots.grad_inner is not None
                book.prime(slots.grad_inner, down.abs().amax())
                down = down @ v.float()
            flow = flow + down


def give_slots(stack: CrossStack, book: list[Slot], margin: int) -> tuple[LayerSlots, ...]:
    """Appends the stack's slots to those of a model's scale book."""

    def new(path: str, name: str) -> int:
        book.append(Slot(name=f"{path}/{name}", largest=Format.E4M3.max, margin=margin))
        return len(book) - 1

    found = []
    for layer in stack.layers:
        first = layer.u if layer.v is None else layer.v
        x, grad_outer = new(first, "input"), new(layer.u, "grad_output")
        low = layer.v is not None
        found.append(
            LayerSlots(
                x=x,
                grad_outer=grad_outer,
                inner=new(layer.u, "input") if low else None,
                grad_inner=new(first, "grad_output") if low else None,
            )
        )
    return tuple(found)
