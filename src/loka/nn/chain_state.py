"""What the chains and cross layers of a model share and keep between steps: scale book, weight bank, who ran.

A step begins with the first of them that runs in it. Then, and only if weights may have changed since,
two launches serve the whole model: the next scales (from what the last step saw) and the FP8 copies of
all weights. Nothing here is in a `state_dict`: it all follows from the weights and the data.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from loka.core.chain import Chain, Epilogue, constant_scale
from loka.core.chain_recipe import FUSED_GEMM, ChainRecipe
from loka.core.producer import may_round
from loka.core.recipe import Format, Gemm
from loka.core.report import site_name
from loka.nn.cross_state import Formed, RunningCross, give_slots
from loka.nn.scale_book import ScaleBook, Slot
from loka.nn.weight_bank import WeightBank, capturing

CALIBRATION = 16  # batches of serving
MARGIN = 1  # octaves of delayed scales: none of 10^5 activation maxima and 4 of gradients lay beyond


@dataclass(kw_only=True)
class RunningChain:
    """A chain that was formed in a model. `kernels` are by site; a user or a plan chose the `named` ones.

    A slot is None where a norm's bound makes the scale a constant. `inputs[l]` is of the input of
    link l (of the prologue's result for l = 0), `gradients[l]` of dZ of link l.
    """

    chain: Chain
    recipe: ChainRecipe
    kernels: Mapping[str, str]
    named: frozenset[str]
    serving: Mapping[str, str]
    modules: Mapping[str, nn.Module]
    place: int
    inputs: tuple[int | None, ...]
    gradients: tuple[int, ...]
    constants: tuple[float | None, ...]
    state: ChainState = field(repr=False)
    last: int = 0  # where the last result lies, for the modules that pass it on
    fed: bool = False  # a stack of cross layers may be served with it (nn/handover.py)

    def linear(self, link: int) -> nn.Linear:
        found = self.modules[self.chain.links[link].path]
        assert isinstance(found, nn.Linear)
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        return {link.path: self.linear(place).weight for place, link in enumerate(self.chain.links)}

    def kernel(
        self, link: int, gemm: Gemm, dtype: torch.dtype = torch.bfloat16, *, training: bool = True
    ) -> str:
        """The GEMM kernel; where nobody named one, it suits the dtype, and serving.

        A producer in the GEMM's epilogue cannot note the maximum that a delayed scale follows. Serving
        follows none, so more links can have it there.
        """
        site = site_name(self.chain.links[link].path, gemm)
        name = self.kernels[site]
        if not training and site in self.serving and dtype == torch.bfloat16:
            return self.serving[site]
        if name.startswith(FUSED_GEMM) and dtype != torch.bfloat16 and site not in self.named:
            return f"torch_fast:{self.recipe.gemm_recipe(gemm)}"
        return name

    def parameters(self) -> list[torch.Tensor]:
        """The prologue norm's, then of each link: weight, bias, gamma, beta; absent ones left out."""
        found = _norm_parameters(self.chain.prologue, self.chain.members, self.modules)
        for place, link in enumerate(self.chain.links):
            linear = self.linear(place)
            found += [linear.weight, *([] if linear.bias is None else [linear.bias])]
            found += _norm_parameters(link.epilogue, link.members, self.modules)
        return found

    def knows_scale(self, link: int) -> bool:
        """Whether the scale of `link`'s input is a constant, or something was seen that it follows."""
        slot = self.inputs[link]
        return slot is None or (not self.recipe.current and self.state.book.primed(slot))

    def current_scales(self) -> torch.Tensor | None:
        """Where a forward or a backward puts current scales, in the book's order: zeros; else None."""
        return self.state.book.blank() if self.recipe.current else None

    def rounds_z(self, link: int) -> bool:
        """Whether forward keeps Z of `link` in eight bits for backward."""
        spec = self.chain.links[link]
        return self.recipe.z8 and may_round(spec.epilogue, spec.out_features, bias=spec.bias)

    def input_scale(self, link: int, current: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [1] of the FP8 operand that link `link` reads: the book's, or of `current_scales`."""
        slot = self.inputs[link]
        if slot is None:
            return self.state.constant(self.constants[link])
        return self.state.book.scale(slot, current)

    def gradient_scale(self, link: int, current: torch.Tensor | None = None) -> torch.Tensor:
        return self.state.book.scale(self.gradients[link], current)

    def largest_unit(self) -> torch.Tensor:
        return self.state.book.unit(self.place)


def _norm_parameters(
    epilogue: Epilogue, members: Sequence[str], modules: Mapping[str, nn.Module]
) -> list[torch.Tensor]:
    for path in members:
        module = modules[path]
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            wanted = [module.weight, getattr(module, "bias", None)]
            return [p for p in wanted if p is not None]
    assert not epilogue.gamma
    assert not epilogue.beta
    return []


class ChainState:
    """All chains and stacks of cross layers of one model, one at least.

    Copying the model copies it, with scales but without the old addresses.
    """

    def __init__(
        self,
        formed: Sequence[tuple[Chain, ChainRecipe, Mapping[str, str], frozenset[str], Mapping[str, str]]],
        modules: Callable[[str], nn.Module],
        crosses: Sequence[Formed] = (),
    ) -> None:
        slots: list[Slot] = []
        self.chains: list[RunningChain] = []
        for place, (chain, recipe, kernels, named, serving) in enumerate(formed):
            running = RunningChain(
                chain=chain,
                recipe=recipe,
                kernels=kernels,
                named=named,
                serving=serving,
                modules={path: modules(path) for path in chain.paths},
                place=place,
                inputs=(),
                gradients=(),
                constants=(),
                state=self,
            )
            self._give_slots(running, slots)
            self.chains.append(running)
        self.crosses = [
            RunningCross(
                formed=formed_,
                modules={path: modules(path) for path in formed_.stack.linears},
                place=len(self.chains) + number,
                slots=give_slots(formed_.stack, slots, MARGIN),
                state=self,
            )
            for number, formed_ in enumerate(crosses)
        ]
        weights = {path: weight for running in self._all() for path, weight in running.weights().items()}
        first = len(slots)
        slots += [Slot(name=f"{path}/weight") for path in weights]
        device = next(iter(weights.values())).device
        self.book = ScaleBook(slots, device, units=len(self.chains) + len(self.crosses))
        self.bank = WeightBank(weights, self.book, first)
        self._constants: dict[float, torch.Tensor] = {}
        self._ran: set[int] = set()
        self._trained = False
        self._calibrated: Counter[int] = Counter()
        self._due = False  # whether scales have something to learn though the weights are as they were
        self._ones: dict[int, torch.Tensor] = {}
        # How often GEMMs ran, by site; counted where they are called (nn/runs.py).
        self.runs = Counter({site_name(path, gemm): 0 for path in weights for gemm in Gemm})
        self.handle = _register(self)

    def _give_slots(self, running: RunningChain, slots: list[Slot]) -> None:
        chain = running.chain
        before = [chain.prologue, *(link.epilogue for link in chain.links[:-1])]
        inputs: list[int | None] = []
        constants: list[float | None] = []
        margin = 0 if running.recipe.current else MARGIN
        for link, epilogue in zip(chain.links, before, strict=True):
            bound = epilogue.bound(link.in_features)
            constants.append(None if bound is None else constant_scale(bound, Format.E4M3.max))
            inputs.append(None if bound is not None else len(slots))
            if bound is None:
                slots.append(Slot(name=f"{link.path}/input", largest=Format.E4M3.max, margin=margin))
        running.inputs, running.constants = tuple(inputs), tuple(constants)
        running.gradients = tuple(range(len(slots), len(slots) + len(chain.links)))
        largest = running.recipe.gradient.max
        slots += [
            Slot(name=f"{link.path}/grad_output", largest=largest, margin=margin) for link in chain.links
        ]

    def _all(self) -> list[RunningChain | RunningCross]:
        return [*self.chains, *self.crosses]

    def begin(self, running: RunningChain | RunningCross, *, training: bool) -> None:
        """Before a chain's or a stack's forward: the step's two launches if this is its first one.

        Not inside of a backward pass: a checkpoint that runs a forward again must find the scales
        and copies that the first run had.
        """
        device = next(iter(running.weights().values())).device
        if device != self.book.device:
            self.book.to(device)
            self._constants, self._ones = {}, {}
        self._trained |= training
        if torch._C._current_graph_task_id() != -1:
            self._due |= training  # a reentrant checkpoint trains here, and only here
            return
        self._adopt()
        recording = capturing(device)
        # Towers may take turns: a step's first chain need not have run in the last step.
        changed = self.bank.changed()
        fresh = changed and not recording  # a capture says nothing about what was before it
        first = training and (not self._ran or running.place in self._ran or fresh)
        if first:
            self._ran.clear()
        if training:
            self._ran.add(running.place)
        if (first and (self._due or recording or fresh or self._frozen())) or (self._due and fresh):
            self.book.update()
            self.bank.refresh()
            self._due = False
        elif not training and changed:
            if not recording:
                self.bank.forget()  # between training steps weights may jump: averages, checkpoints
            self.bank.refresh()
            self._due = True  # the next training step finds the weights unchanged, and has scales to move

    def calibrates(self, slot: int) -> bool:
        """Whether to take the scale from the values at hand: the first time, and while serving what was
        never trained here, whose scales nothing else would move, for the first batches."""
        found = self.calibrating(slot)
        if found and self.book.primed(slot):
            self._calibrated[slot] += 1
        return found

    def calibrating(self, slot: int) -> bool:
        """What `calibrates` is about to say; this counts no batch."""
        if not self.book.primed(slot):
            return True
        enough = self._calibrated[slot] >= CALIBRATION
        return not (self._trained or enough or capturing(self.book.device))

    def _frozen(self) -> bool:
        """Nothing changes these weights, so that no change of theirs marks a step."""
        return not any(weight.requires_grad for weight in self.bank.weights.values())

    def _adopt(self) -> None:
        """Parameters that were replaced by other objects, as load_state_dict(assign=True) does."""
        for running in self._all():
            for path, weight in running.weights().items():
                if self.bank.weights[path] is not weight:
                    self.bank.weights[path] = weight
                    self.bank.forget()

    def constant(self, value: float | None) -> torch.Tensor:
        assert value is not None
        if value not in self._constants:
            with torch.inference_mode(mode=False):
                self._constants[value] = torch.full((1,), value, device=self.book.device)
        return self._constants[value]

    def ones(self, size: int) -> torch.Tensor:
        """float32 [1, size]: the scales of a weight's columns where the rows' scales hold the weight's."""
        if size not in self._ones:
            with torch.inference_mode(mode=False):
                self._ones[size] = torch.ones(1, size, device=self.book.device)
        return self._ones[size]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_constants": {}, "_ones": {}, "_ran": set()}

    def __setstate__(self, content: dict[str, Any]) -> None:
        self.__dict__.update(content)
        self.handle = _register(self)


# Ops take numbers and tensors only: a chain is named by its model's handle and its place.
_STATES: weakref.WeakValueDictionary[int, ChainState] = weakref.WeakValueDictionary()
_HANDLES = itertools.count(1)


def _register(state: ChainState) -> int:
    handle = next(_HANDLES)
    _STATES[handle] = state
    return handle


def running_chain(handle: int, place: int) -> RunningChain:
    return _STATES[handle].chains[place]


def running_cross(handle: int, place: int) -> RunningCross:
    """`place` is that of the stack's unit in the book, which those of the chains come before."""
    state = _STATES[handle]
    return state.crosses[place - len(state.chains)]
