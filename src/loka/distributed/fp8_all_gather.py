"""FSDP2's all-gather of weights in eight bits.

    before a forward   m = max over ranks and rows |W|                one all-reduce for all weights
    or an unshard      of those that are not gathered at the moment
                       s = 2^(ceil(log2 m) - 8),  local8 = e4m3(W_local / s)
    each gather        rows of bytes, one an element; scales do not travel, all ranks have them
    a site             reads the bytes that came (nn/fp8_weight.py)

So every rank has the FP8 copy of the whole weight that one process would make of it, scale and bytes
(kernels/quantize/weight_copies.py): nothing depends on how rows are shared out. Each shard is quantized once
for a forward and its backward, from the master weights as they are then: load_state_dict, EMA or `.data`
leave nothing stale that FSDP2 gathers anew. What it keeps gathered stays, bytes and scale, as its own gathers
do. Parameters, gradients, optimizer and state dict stay FSDP2's plain ones.

It costs one byte for each element of this rank's shards, and one all-reduce of a number for each weight in
front of the first gather. Of bf16 gathers it saves half the bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from loka.core.exceptions import LokaError, NotConverted, PlanMismatch
from loka.core.exchange import gather_json, global_rank, has_group, same_on_all
from loka.core.problem import dtype_name
from loka.core.recipe import Gemm
from loka.core.records.plan import Plan
from loka.core.records.report import HP, site_name
from loka.core.table import format_table
from loka.kernels.gemm.registry import candidate_named
from loka.kernels.quantize.fp8_weights import cast_rows, room_for_rows
from loka.kernels.quantize.weight_copies import FP8, bits_of_scale
from loka.nn.fp8_weight import CAST, Fp8Weight, scale_length
from loka.nn.fsdp_units import Sharded, sharded_parameters, units_of
from loka.nn.leaves import LinearForward
from loka.nn.site import SiteForward, site_forwards


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """How a parameter is gathered. `why`: why not in FP8, or None where it is in FP8.

    `numel`: elements on one rank, with the padding of uneven shards. `dtype`: that of FSDP2's own all-gather.
    """

    name: str
    unit: str
    numel: int
    dtype: torch.dtype
    why: str | None

    @property
    def wire_bytes(self) -> int:
        """The bytes that a rank sends in one gather."""
        return self.numel * (1 if self.why is None else self.dtype.itemsize)


class Fp8AllGather:
    """What `fp8_all_gather` set up: `parameters` in order. `str()` makes a table of them."""

    def __init__(self, parameters: tuple[Gathered, ...], exchange: Exchange | None) -> None:
        self.parameters = parameters
        self.exchange = exchange

    @property
    def in_fp8(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.parameters if one.why is None)

    @property
    def wire_bytes(self) -> int:
        """The bytes that a rank sends in one gather of all units."""
        return sum(one.wire_bytes for one in self.parameters)

    @property
    def wire_bytes_in_bf16(self) -> int:
        """The same number if every parameter were gathered in 16 bits."""
        return sum(one.numel * 2 for one in self.parameters)

    def remove(self) -> None:
        """Gives FSDP2 its own all-gather back. Call it before `loka.revert`."""
        if self.exchange is not None:
            self.exchange.stop()
            self.exchange = None

    def __str__(self) -> str:
        header = ("parameter", "unit", "bytes", "gathered in", "why not in FP8")
        rows = [
            (p.name, p.unit or "(root)", p.wire_bytes, dtype_name(p.dtype) if p.why else "FP8", p.why or "")
            for p in self.parameters
        ]
        share = self.wire_bytes / max(self.wire_bytes_in_bf16, 1)
        total = f"{self.wire_bytes} bytes of a rank in a gather of all units, {share:.3f} of bf16's"
        return f"{format_table(header, rows)}\n{total}"


def fp8_all_gather(
    model: nn.Module, plan: Plan, *, filter: Callable[[str], bool] | None = None, units: Collection[str] | None = None
) -> Fp8AllGather:
    """Has FSDP2 gather the weights of FP8 sites in eight bits, as the sites read them. A collective.

    Call it on every rank after `convert` and `fully_shard`, in either order, and before the first forward or
    between two steps. A weight qualifies where it belongs to an `nn.Linear` whose `output` and, if the plan
    has that, `grad_input` run by e4m3 with power-of-two row scales (`rowwise_e4m3_pow2`). It then has one
    scale, a power of two, instead of one for each row: the same numbers, but for elements about 2^14 below the
    largest of all.
    All else is gathered as before, and the result says why.

    Args:
        model: converted by `plan`, with units of `fully_shard` in it.
        filter: names of parameters to gather in FP8; all that qualify without it.
        units: paths of units whose weights alone may be, as `choose_gather` takes them.

    Raises:
        LokaError: no process group or no FSDP2 unit; torch is built otherwise than expected.
        NotConverted: no site of the model runs by a plan, or it gathers in FP8 already.
        PlanMismatch: ranks would gather other parameters in FP8, or one cannot; on all ranks.
    """
    mine: str | LokaError = "it can gather in FP8"
    forwards = {id(forward.module): forward for forward in site_forwards(model).values()}
    try:
        chosen, parameters = _chosen(model, plan, forwards, filter, units)
    except LokaError as error:
        mine = error
    same_on_all(mine, None, what="some ranks cannot gather in FP8, and the others would wait for them", way_out=_ALIKE)
    _check_alike(parameters)
    exchange = Exchange(model, chosen, forwards) if chosen else None
    return Fp8AllGather(tuple(parameters), exchange)


_ALIKE = "convert the model by one plan on all ranks (loka.agree), and shard it alike"


def _chosen(
    model: nn.Module,
    plan: Plan,
    forwards: dict[int, SiteForward],
    filter: Callable[[str], bool] | None,
    units: Collection[str] | None,
) -> tuple[list[Sharded], list[Gathered]]:
    """What to gather in FP8, and how each parameter is gathered. Raises LokaError on this rank alone."""
    if not has_group() or not units_of(model):
        raise LokaError(
            "the model has no unit of FSDP2", way_out="torch.distributed.fsdp.fully_shard(...) first, by torchrun"
        )
    if not forwards:
        raise NotConverted("no site of this model runs by a plan", way_out="loka.convert(model, plan) first")
    found = sharded_parameters(model)
    if any(one.is_hooked for one in found):
        raise NotConverted("this model gathers in FP8 already", way_out="remove() what gathers so first")
    chosen: list[Sharded] = []
    parameters = []
    for one in found:
        why = one.unfit() or _unplanned(one, forwards, plan)
        if why is None and filter is not None and not filter(one.name):
            why = "left out by the filter"
        if why is None and units is not None and one.unit not in units:
            why = "its unit is not faster so"
        if why is None and chosen and one.group is not chosen[0].group:
            why = "its unit is sharded over another group of ranks than the first"
        if why is None:
            chosen.append(one)
        parameters.append(
            Gathered(name=one.name, unit=one.unit, numel=one.padded.numel(), dtype=one.gathers_in, why=why)
        )
    return chosen, parameters


def _unplanned(one: Sharded, forwards: dict[int, SiteForward], plan: Plan) -> str | None:
    if len(one.size) != 2 or 0 in one.size:
        return "it is no matrix"
    if len(one.owners) > 1:
        return "several modules hold it"
    module, attribute = one.owners[0]
    forward = forwards.get(id(module))
    if forward is None:
        return "no site runs by it"
    if not isinstance(forward, LinearForward) or type(forward) is not LinearForward or attribute != "weight":
        return "its site is not of an nn.Linear"
    site = forward.site
    for gemm, name in zip(Gemm, site.candidates, strict=True):
        if gemm is Gemm.GRAD_WEIGHT:
            continue  # does not read the weight
        if gemm is Gemm.GRAD_INPUT and site_name(site.name, gemm) not in plan.decisions:
            continue  # its input is data; a call that wants the gradient raises
        if name == HP:
            return f"{gemm} runs in high precision"
        casts = candidate_named(name).recipe.casts(gemm)
        if casts is None or casts[1] != CAST:
            return f"{gemm} by {name} wants other scales than powers of two of rows"
    return None


def _check_alike(parameters: list[Gathered]) -> None:
    """Raises PlanMismatch where ranks would gather different things: they would wait for each other forever."""
    lists = gather_json([[one.name, one.numel, one.why] for one in parameters])
    differences = [
        f"rank {rank}: {name}: {_told(why)}, and {_told(first_why)} on rank {global_rank(None, 0)}"
        for rank, theirs in enumerate(lists)
        for (name, _, why), (_, _, first_why) in zip(theirs, lists[0], strict=False)
        if why != first_why
    ]
    differences += [
        f"rank {rank}: {len(theirs)} parameters, and {len(lists[0])} on rank 0"
        for rank, theirs in enumerate(lists)
        if [name for name, *_ in theirs] != [name for name, *_ in lists[0]]
    ]
    if differences:
        raise PlanMismatch("the ranks would gather other parameters in FP8", why=differences, way_out=_ALIKE)


def _told(why: str | None) -> str:
    return "in FP8" if why is None else f"not in FP8 ({why})"


class Exchange:
    """The bytes that this rank sends, and the scales that all ranks have.

    Bytes and scales keep their addresses. `_under_way` are the units whose forward is: the outermost one, the
    model or a part of it that is called by itself, renews them. So does a gather that no forward and no backward
    asked for: `unshard`, or a method of `register_fsdp_forward_method`; and one of a backward, where another forward,
    of other weights maybe, came behind that whose backward it is.
    """

    def __init__(self, model: nn.Module, chosen: list[Sharded], forwards: dict[int, SiteForward]) -> None:
        self.chosen = chosen
        self.sites = [cast(LinearForward, forwards[id(one.owners[0][0])]) for one in chosen]
        self._group = chosen[0].group
        device = chosen[0].padded.device
        lengths = [scale_length(*one.size) for one in chosen]
        self._weight_of = torch.repeat_interleave(torch.tensor(lengths)).to(device)
        self._scales = torch.empty(sum(lengths), device=device)
        self._largest = torch.empty(len(chosen), device=device)
        self._bytes = [room_for_rows(one.padded) for one in chosen]
        together: dict[int, list[int]] = {}  # what is gathered at once
        for index, one in enumerate(chosen):
            together.setdefault(id(one.beside), []).append(index)
        asked = {which[0]: partial(self._asked, which) for which in together.values()}
        self._hooks = [
            _Hooks(one.size, own, scale, asked.get(index))
            for index, (one, own, scale) in enumerate(
                zip(chosen, self._bytes, self._scales.split(lengths), strict=True)
            )
        ]
        self.by_hand = False  # whether nothing but `agree_on_scales` and `quantize` renews
        self._units = list(units_of(model).values())
        self._under_way: list[Any] = []
        self._graphs = weakref.WeakSet[_Graph]()  # of forwards
        self._overtaken = False  # a forward whose backward is to come by another one
        self._handles = []
        # Each of the two would break a graph of its own where it is traced; FSDP2's are left out as well.
        enter, leave = torch.compiler.disable(self._enter), torch.compiler.disable(self._leave)
        for unit in self._units:
            # Not the module that a hook is called with: zoo.dense_part shares hooks with its model.
            self._handles.append(unit.register_forward_pre_hook(partial(enter, unit), prepend=True))
            self._handles.append(unit.register_forward_hook(partial(leave, unit), always_call=True))
        self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        """Agrees on the scales of weights as they are now, and quantizes this rank's rows of them: of those that
        are not gathered, whose scale is read with the bytes that came. A collective where there are any."""
        which = []
        for index, (hooks, one, forward) in enumerate(zip(self._hooks, self.chosen, self.sites, strict=True)):
            if forward.module.__dict__.get("forward") is not forward:
                raise NotConverted(
                    f"{one.name} is gathered in FP8, and its site does not run any more",
                    way_out="remove() what fp8_all_gather returned before loka.revert(model)",
                )
            if one.is_gathered:
                continue
            if not one.is_hooked:
                one.hook(hooks.before, hooks.after)
            which.append(index)
        if which:
            self.agree_on_scales(which)
            self.quantize(which)

    @torch.no_grad()
    def agree_on_scales(self, which: Sequence[int]) -> None:
        """The scales of these weights, by one all-reduce. A collective."""
        shards = [self.chosen[index].padded for index in which]
        largest = torch.stack(torch._foreach_norm(shards, torch.inf)).float()
        # A maximum over ranks may drop a NaN; infinity stays, and both make a scale of NaN.
        largest = torch.where(largest.isfinite(), largest, torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        if len(which) == len(self.chosen):
            self._largest.copy_(largest)
            self._scales.copy_(bits_of_scale(largest).view(torch.float32)[self._weight_of])
            return
        for index, each in zip(which, largest, strict=True):
            self._largest[index].copy_(each)
            self._hooks[index].scale.copy_(bits_of_scale(each).view(torch.float32))

    @torch.no_grad()
    def quantize(self, which: Sequence[int]) -> None:
        """This rank's rows of these weights, by the scales that were agreed on last."""
        shards = [self.chosen[index].padded for index in which]
        scales = [self._hooks[index].scale for index in which]
        cast_rows(shards, [self._bytes[index] for index in which], scales, self._largest, which)

    def hook(self, which: Iterable[int], *, on: bool) -> None:
        """Has FSDP2 gather some of `chosen` in FP8, or in its own way; `renew` puts all hooks back."""
        for index in which:
            self.chosen[index].unhook()
            if on:
                self.chosen[index].hook(self._hooks[index].before, self._hooks[index].after)

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        for unit in self._units:
            unit.reshard()  # type: ignore[operator]
        for one in self.chosen:
            one.unhook()

    def _enter(self, unit: Any, module: Any, args: Any) -> None:
        # Checkpointed forwards run again in backward, and are to find what they found before.
        self._out_of(unit)  # where an interrupt ended it, torch called no hook behind it
        self._under_way.append(unit)  # first, for `_leave` is called even where this raises
        if len(self._under_way) == 1 and torch._C._current_graph_task_id() == -1:
            self._overtaken = not all(graph.gone for graph in self._graphs)
            self.renew()
            if self._scales.is_cuda:  # gathers wait for the optimizer alone where a user has said so
                unit.set_post_optim_event(torch.cuda.current_stream().record_event())

    def _asked(self, which: Sequence[int]) -> None:
        """A gather of these begins."""
        if torch._C._current_graph_task_id() == -1:
            if not (self._under_way or self.by_hand):
                self.renew()
            return
        if self._overtaken and not self.by_hand:
            self.agree_on_scales(which)
            self.quantize(which)

    def _leave(self, unit: Any, module: Any, args: Any, output: Any) -> None:
        outermost = self._under_way[:1] == [unit]
        self._out_of(unit)
        if not outermost or torch._C._current_graph_task_id() != -1:
            return
        graph = _Graph()
        self._graphs.add(graph)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(graph.begins)  # which keeps it as long as the graph is there

    def _out_of(self, unit: Any) -> None:
        """Of it, and of what it had called."""
        if unit in self._under_way:
            del self._under_way[self._under_way.index(unit) :]


class _Graph:
    """Of a forward; `gone`: backward went through it."""

    gone = False

    def begins(self, gradients: object) -> None:
        self.gone = True


class _Hooks:
    """Of one parameter [N, K], around FSDP2's all-gather of `own` uint8 [ceil(N / ranks), K]. `asked`: called
    before, of the first of those that are gathered at once."""

    def __init__(
        self, size: torch.Size, own: torch.Tensor, scale: torch.Tensor, asked: Callable[[], None] | None
    ) -> None:
        self.size, self.own, self.scale, self.asked = size, own, scale, asked

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hooks:
        return self  # copies of a parameter are no unit's

    def before(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        if self.asked is not None:
            self.asked()
        return (self.own,), None

    def after(
        self, outputs: tuple[torch.Tensor, ...], metadata: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The weight as a view of the bytes that came; a later gather writes to the same ones."""
        if out is not None:
            return None
        (data,) = outputs  # [ranks * ceil(N / ranks), K]
        return Fp8Weight(data[: self.size[0]].view(FP8), self.scale, dtype), ()
