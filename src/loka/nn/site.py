"""A site in a converted model, and what replaces the `forward` of the module that calls it.

    y [..., N] = x [..., K] @ weight [N, K]^T,   each of its three GEMMs by its candidate

The module object, its class, parameters, hooks and `state_dict` stay as they are: only an attribute `forward`
stands on the instance, which hides the class's. Other libraries may change the class meanwhile (FSDP2,
parametrizations), and `remove` takes away no more than was put there. A site holds no copy of a weight
and no scale, so every way of calling the module is right; its one tensor is telemetry.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import CodeType, MethodType
from typing import Any

import torch
from torch import nn

from loka.core.exceptions import NotConverted
from loka.core.numerics.centring import restore, subtract
from loka.core.problem import FLOATS
from loka.core.recipe import Gemm
from loka.core.records.report import HP, site_name
from loka.core.signature import child_path
from loka.kernels.quantize.side import BAD_A, BAD_B, RUNS, new_health
from loka.nn.site_gemms import multiply
from loka.nn.site_ops import Candidates
from loka.nn.unwrap import named_modules

# What a site computes in. Autocast recasts these too, and leaves every other dtype alone.
DTYPES = FLOATS

# Of an input; nested tensors are of either.
LAYOUTS = (torch.strided, torch.jagged)

OPERAND_NAMES = {
    Gemm.OUTPUT: ("input", "weight"),
    Gemm.GRAD_INPUT: ("grad_output", "weight"),
    Gemm.GRAD_WEIGHT: ("grad_output", "input"),
}


class Site:
    """A GEMM with a parameter: its name, its candidates for output, grad_input and grad_weight, its health.

    `join`: torch.compile may join it with other sites (loka/compiler).
    `centre` float32 [K] is taken off the input and put back (core/numerics/centring.py), `hot` int64 [32] are
    the columns of a hot recipe (core/numerics/hot_columns.py); the plan holds both.
    `health` int64 [3, 3] (kernels/quantize/side.py) is no buffer: DistributedDataParallel would
    overwrite every rank's flags with those of rank 0, and the model's buffers are the user's.
    """

    def __init__(
        self,
        name: str,
        candidates: Candidates,
        device: torch.device,
        *,
        join: bool = False,
        centre: torch.Tensor | None = None,
        hot: torch.Tensor | None = None,
    ) -> None:
        self.name = name
        self.candidates = candidates
        self.join = join
        with torch.inference_mode(False):  # an inference tensor could not be counted in later
            self.health = new_health(device)
            # A device without memory would lose what the plan gave; the first call moves it.
            self.centre, self.hot = centre, hot
            if device.type != "meta":
                self._move(device)

    def _move(self, device: torch.device) -> None:
        """Takes the counters to where the model was moved, or begins them where it had no memory yet."""
        with torch.inference_mode(False):
            self.centre = None if self.centre is None else self.centre.to(device)
            self.hot = None if self.hot is None else self.hot.to(device)
            if self.health.is_meta:
                self.health = torch.zeros_like(self.health, device=device)
            else:
                self.health = self.health.to(device)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [..., K], weight [N, K] -> [..., N] in the dtype of x, or autocast's where that is on.

        Quantizes from the weight as it is stored: float32 weights are rounded once.
        """
        if x.shape[-1] != weight.shape[-1]:
            raise ValueError(f"{self.name}: input has {x.shape[-1]} features, the weight takes {weight.shape[-1]}")
        if x.layout not in LAYOUTS:
            raise NotConverted(
                f"{self.name}: its input is sparse ({x.layout}), and no kernel in FP8 reads it",
                way_out="give it x.to_dense(), or keep it in high precision: "
                f"loka.plan(report, force={{'{self.name}/*': 'hp'}})",
            )
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.dtype in DTYPES:
            x = x.to(torch.get_autocast_dtype(kind))
        elif x.dtype != weight.dtype:
            raise RuntimeError(
                f"{self.name}: input is {x.dtype}, the weight {weight.dtype}; cast one, or use torch.autocast"
            )
        if self.health.device != x.device:
            self._move(x.device)
        if x.dim() == 2:  # two views less for the host to make, and to go back through
            return self._rows(x, weight)
        y = self._rows(x.reshape(-1, x.shape[-1]), weight)
        # As F.linear does: a plain view of a custom function's output refuses in-place ops.
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], weight.shape[0]])

    def _rows(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.centre is None:
            return multiply(x, weight, self.health, self.name, self.candidates, self.join, self.hot)
        x = subtract(x, self.centre)
        y = multiply(x, weight, self.health, self.name, self.candidates, self.join, self.hot)
        return restore(y, self.centre, weight)


class SiteForward(ABC):
    """Stands as `forward` on the instance of a module that calls sites; abstract.

    A plain object that holds its module: deepcopy and pickle carry both over together, where a bound method
    or a closure would go on calling the original.

    `path` is the module's in the model that was converted, to which the names of the sites belong.
    """

    path = ""

    def __init__(self, module: nn.Module, sites: list[Site]) -> None:
        self.module = module
        self.sites = sites
        self.before = module.__dict__.get("forward")  # another library's

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward computes, with its GEMMs by the sites."""

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the original forward. torch.export names inputs and dynamic shapes by it, and trainers
        choose columns by it.
        """
        return inspect.signature(self._original)

    @property
    def __code__(self) -> CodeType:
        """The code of the original forward, which torch.export shows in its reports."""
        return getattr(self._original, "__code__", type(self).__call__.__code__)

    @property
    def _original(self) -> Callable[..., Any]:
        if self.before is not None:
            return self.before
        return MethodType(type(self.module).forward, self.module)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward that the module had before."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


_KEPT = "loka_forward"  # beside `forward`, to find it where another library has wrapped that
_REPLICATE = "_replicate_for_data_parallel"


def install(forward: SiteForward) -> None:
    """Puts the forward on its module."""
    holder = forward.module.__dict__
    holder["forward"] = holder[_KEPT] = forward
    holder[_REPLICATE] = _refuse_replicas


def _refuse_replicas() -> None:
    """In the place of the method by which nn.DataParallel makes shallow copies. Their forwards would read the weights
    of the original, on another GPU, and leave the replicas' own without gradients."""
    raise NotConverted(
        "a converted model cannot be replicated by nn.DataParallel",
        why=["a replica is a shallow copy, whose sites read the weights of the original"],
        way_out="take DistributedDataParallel, with a process for each GPU, or loka.revert(model)",
    )


def site_forwards(model: nn.Module) -> dict[str, SiteForward]:
    """The installed forwards by module path."""
    return {path: module.__dict__[_KEPT] for path, module in named_modules(model) if _KEPT in module.__dict__}


def refuse_replaced(model: nn.Module) -> None:
    """Raises NotConverted where another library replaced the `forward` of a converted module."""
    replaced = [
        f"{path or 'the model'}: forward is now {_told(module.__dict__.get('forward'))}"
        for path, module in named_modules(model)
        if _KEPT in module.__dict__ and module.__dict__.get("forward") is not module.__dict__[_KEPT]
    ]
    if replaced:
        raise NotConverted(
            "another library replaced the forward of modules after they were converted",
            why=replaced,
            way_out="undo that first, then loka.revert(model)",
        )


def _told(forward: object) -> str:
    if forward is None:
        return "the class's own, so its sites do not run"
    return getattr(forward, "__qualname__", type(forward).__qualname__)


def remove(forward: SiteForward) -> None:
    """Takes the forward off its module, which then runs as it was found."""
    stand_aside(forward)
    for name in (_KEPT, _REPLICATE):
        forward.module.__dict__.pop(name, None)


def stand_aside(forward: SiteForward) -> None:
    """Has the module run as it was found, until `install` is called; `site_forwards` finds its sites all the same."""
    holder = forward.module.__dict__
    holder.pop("forward", None)
    if forward.before is not None:
        holder["forward"] = forward.before


def sites_of(model: nn.Module) -> dict[str, Site]:
    """The converted sites by name. Sites of a part that was converted by itself have the path of the part in front."""
    return {
        child_path(_converted_at(path, forward.path), site.name): site
        for path, forward in site_forwards(model).items()
        for site in forward.sites
    }


def _converted_at(path: str, inner: str) -> str:
    """The path in this model of the part that was converted: its module `inner` is `path` here.

    "" where the model is that part, or lies inside of it.
    """
    if not inner:
        return path
    return path.removesuffix(f".{inner}") if path.endswith(f".{inner}") else ""


def health_of(model: nn.Module) -> dict[str, dict[str, int | bool]]:
    """Per FP8 site: `runs` so far, and whether a non-finite `a` or `b` operand was ever seen.

    Counted on the device, so CUDA-graph replays count too. Reading it synchronizes.
    """
    found: dict[str, dict[str, int | bool]] = {}
    for name, site in sites_of(model).items():
        for gemm, candidate, counts in zip(Gemm, site.candidates, site.health.tolist(), strict=True):
            if candidate != HP:
                found[site_name(name, gemm)] = {
                    "runs": counts[RUNS],
                    "bad_a": bool(counts[BAD_A]),
                    "bad_b": bool(counts[BAD_B]),
                }
    return found
