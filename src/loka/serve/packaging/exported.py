"""A frozen model as a module that torch.export traces, with a name for every tensor in which versions of it differ."""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from loka.core.numerics.reference import Quantized, quantize
from loka.core.recipe import Gemm
from loka.core.records.plan import Plan
from loka.core.records.report import HP
from loka.core.storage.files import digest_of
from loka.graph.attach import attach, detach
from loka.kernels.gemm.aten import aten_gemm
from loka.kernels.gemm.registry import candidate_named
from loka.nn.unwrap import named_modules
from loka.planner.convert import fp8_layers
from loka.serve.build import share
from loka.serve.model.code import steady_data
from loka.serve.rows import digest
from loka.serve.run import Runner
from loka.serve.sites import FrozenSite, HighPrecisionSite, as_rows, frozen_sites

_FEW = 8
"""Entries of a tensor of less than two sides that Inductor writes into the code as numbers, as it does a single entry
of any tensor (torch 2.11 to 2.14). New weights would not reach them there."""


class PackagedSite(nn.Module):
    """A frozen site that no region may join, in aten ops that torch.export traces with any number of rows."""

    weight: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor | None

    def __init__(self, site: FrozenSite) -> None:
        super().__init__()
        self.site, self.sides, self.dtype = site.name, site.weight.sides, site.weight.dtype
        self.candidate = candidate_named(site.candidate)
        self.register_buffer("weight", site.weight.low.data)
        self.shape = site.weight.low.scale.shape
        self.register_buffer("scale", _kept(site.weight.low.scale))
        self.register_buffer("input_scale", None if site.input_scale is None else _kept(site.input_scale))

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N], as FrozenSite."""
        rows = as_rows(self.site, x, self.sides[1], self.dtype)
        casts = self.candidate.recipe.casts(Gemm.OUTPUT)
        assert casts is not None
        scale = None if self.input_scale is None else self.input_scale[0]
        with torch.autocast(rows.device.type, enabled=False):
            low = quantize(rows, casts[0], padded=(rows.shape[0], self.weight.shape[1]), scale=scale)
            low_weight = Quantized(self.weight, _shaped(self.scale, self.shape), casts[1])
            y = aten_gemm(self.candidate.kernel.name, low, low_weight, rows.dtype)
        return y[:, : self.sides[0]].reshape(*x.shape[:-1], self.sides[0])


class _JoinedSite(nn.Module):
    """The tensors of a site that a region may join. `site` is nobody else's."""

    def __init__(self, site: FrozenSite) -> None:
        super().__init__()
        self.site = site
        held = site.weight.tensors() | ({} if site.input_scale is None else {"input_scale": site.input_scale})
        self.shapes = {name: tensor.shape for name, tensor in held.items()}
        for name, tensor in held.items():
            self.register_buffer(name, _kept(tensor))

    def bind(self) -> None:
        """The site multiplies by the buffers."""
        held = {name: _shaped(getattr(self, name), shape) for name, shape in self.shapes.items()}
        low = replace(self.site.weight.low, data=held["data"], scale=held["scale"])
        self.site.weight = replace(self.site.weight, low=low, even=held.get("even"))
        self.site.input_scale = held.get("input_scale")


class _Held(nn.Module):
    """The model with packaged sites, and what it reads: parameters and buffers are all that versions differ in."""

    def __init__(self, model: nn.Module, sites: Sequence[nn.Module], run: Runner) -> None:
        super().__init__()
        self.model, self.run = model, run
        self.sites = nn.ModuleList(sites)
        tensors = dict((*model.named_parameters(), *model.named_buffers()))
        small = {name: tensor for name, tensor in tensors.items() if _written_into_code(tensor)}
        self.shapes = {name: tensor.shape for name, tensor in small.items()}
        self.small = nn.ParameterList(nn.Parameter(_kept(one.detach()), requires_grad=False) for one in small.values())

    def forward(self, *columns: torch.Tensor) -> Any:
        for site in self.sites:
            if isinstance(site, _JoinedSite):
                site.bind()
        small = {name: _shaped(one, shape) for (name, shape), one in zip(self.shapes.items(), self.small, strict=True)}

        def call(*args: Any, **kwargs: Any) -> Any:
            return functional_call(self.model, small, args, kwargs)

        return _plain(self.run(call if small else self.model, columns))  # type: ignore[arg-type]  # a module's call


class Exported(nn.Module):
    """The model with packaged sites, called with the columns of the form in their order.

    The names of its tensors hold a digest of their names and forms and of the sites' candidates, so that a package
    refuses those of another one: torch looks at names alone, and copies from any memory.

    `kept`: digests of what modules keep beside tensors, which extra state and hooks of a state dict may set. The code
    holds it, and no weights replace it.
    """

    def __init__(self, held: nn.Module, candidates: Sequence[str], kept: dict[str, str]) -> None:
        super().__init__()
        self.kept = kept
        forms = [[name, list(one.shape), str(one.dtype)] for name, one in tensors_of(held).items()]
        self.layout = f"layout_{digest_of([forms, list(candidates)])[:16]}"
        self.add_module(self.layout, held)

    def forward(self, *columns: torch.Tensor) -> Any:
        return getattr(self, self.layout)(*columns)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors in which versions differ, by all names that they have: a package's constants are some of these."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: one.detach() for name, one in named}


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a package says of itself: metadata of the file.

    `layout`, `kept`: of `Exported`. `written`: `in_code`. `batch`: the least and the most rows of a call.
    """

    layout: str
    written: dict[str, str]
    kept: dict[str, str]
    batch: tuple[int, int]


def contents_of(model: Exported, batch: tuple[int, int], read: Collection[str]) -> Contents:
    """`read`: names of the tensors that the exported code reads."""
    return Contents(layout=model.layout, written=in_code(model, read), kept=model.kept, batch=batch)


def in_code(model: Exported, read: Collection[str]) -> dict[str, str]:
    """Digests of the tensors in `read` that the code holds as numbers, by name: no weights replace them."""
    return {
        name: digest([[one]]) for name, one in tensors_of(model).items() if name in read and _written_into_code(one)
    }


def _written_into_code(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 or (tensor.dim() < 2 and 0 < tensor.numel() <= _FEW)


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """The same entries twice, in rows, where Inductor would write them into the code."""
    return tensor.reshape(1, -1).repeat(2, 1) if _written_into_code(tensor) else tensor


def _shaped(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Undoes `_kept`."""
    return tensor if tensor.shape == shape else tensor[0].view(shape)


def _as_copied(tensor: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    """Nothing of a weight whose FP8 copy is in a site; and rows in their order, as new weights are copied as bytes."""
    if tensor.is_meta:
        return nn.Parameter(torch.empty(0, dtype=tensor.dtype, device="cpu"), requires_grad=False)
    if tensor.is_contiguous():
        return tensor
    laid = tensor.detach().contiguous()
    return copies.setdefault(
        id(tensor), nn.Parameter(laid, requires_grad=False) if isinstance(tensor, nn.Parameter) else laid
    )


def _plain(output: Any) -> Any:
    """In tuples, lists and dicts: torch writes no other class into a file, as named tuples are."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return {key: _plain(value) for key, value in output.items()}
    return (list if isinstance(output, list) else tuple)(map(_plain, output))


def exported(frozen: nn.Module, plan: Plan, run: Runner, device: torch.device) -> Exported:
    """Of the tree of a version on `device`, whose tensors it shares."""
    own_sites = frozen_sites(frozen)
    sites: dict[str, Any] = {
        name: PackagedSite(site) if site.weight.joined is None else copy.copy(site) for name, site in own_sites.items()
    }
    tree = share(frozen)
    detach(tree)
    # Called with a site that no row reached, tracing raises: such a path cannot be in a package.
    attach(
        tree,
        plan.model.layers,
        {path: chosen for path, chosen in fp8_layers(plan).items() if chosen[0] == HP or path in sites},
        make=lambda name, *_, **__: sites.get(name) or HighPrecisionSite(name),
    )
    copies: dict[int, torch.Tensor] = {}
    for _, module in named_modules(tree):
        kinds: list[dict[str, Any]] = [module._parameters, module._buffers]
        for own in kinds:
            own.update({name: _as_copied(one, copies) for name, one in own.items() if one is not None})
    held = [site if isinstance(site, nn.Module) else _JoinedSite(site) for site in sites.values()]
    candidates = [site.candidate for site in own_sites.values()]
    return Exported(_Held(tree, held, run), candidates, steady_data(frozen, run, device))
