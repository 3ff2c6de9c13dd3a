"""Chains in a model: which modules run a chain as a whole, and undoing it.

The first module of a chain computes all of it, and the others pass their input on: the user's own
forward code runs as before, module by module. Module objects, names, parameters and `state_dict` keys
stay; only the class of each object changes, to one that is also its old class.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from loka.core.chain import Chain, Link, Norm
from loka.core.chain_recipe import FUSED_GEMM, ChainRecipe, chain_recipe_named
from loka.core.cross_record import CrossStack
from loka.core.exceptions import NoKernelFits, NotConverted
from loka.core.problem import target_of
from loka.core.producer import may_round
from loka.core.recipe import Gemm
from loka.core.report import site_name
from loka.kernels.fused_gemm import unsupported as fused_unsupported
from loka.kernels.producer import unsupported
from loka.kernels.registry import candidate_named
from loka.nn.block_norm import BlockNorm
from loka.nn.chain_kernels import plain_kernels
from loka.nn.chain_ops import ChainGemms
from loka.nn.chain_parts import Part, join
from loka.nn.chain_state import ChainState, RunningChain
from loka.nn.cross import Crossed, prepare, restore, running_crosses, swap
from loka.nn.handover import is_result, join_readers
from loka.nn.unwrap import named_modules, unwrap
from loka.nn.watched import foreign_hooks


class Chained(nn.Module):
    """A module inside a chain. `loka_chain` is the chain where this is the first one, else None."""

    loka_chain: RunningChain | None
    loka_inside: RunningChain
    loka_was: type[nn.Module]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.loka_chain is not None:
            return input if is_result(self.loka_chain, input) else _run(self.loka_chain, input)
        _expect(self.loka_inside, input)
        return input

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.loka_inside.state.bank.forget()  # loaded weights may be far from what the scales are used to

    def extra_repr(self) -> str:
        was = super().extra_repr()
        how = "chained" if self.loka_chain is None else f"runs a chain, {self.loka_chain.recipe.candidate}"
        return f"{was}, {how}" if was else how


def _run(running: RunningChain, input: torch.Tensor) -> torch.Tensor:
    first = running.chain.links[0]
    linear = running.linear(0)
    if input.shape[-1] != first.in_features:
        raise ValueError(
            f"{first.path}: input has {input.shape[-1]} features, the chain takes {first.in_features}"
        )
    kind, dtype = input.device.type, linear.weight.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        if running.chain.prologue.norm is Norm.NONE:  # a norm reads what is there, as under autocast
            input = input.to(dtype)
    elif input.dtype != linear.weight.dtype:
        raise TypeError(
            f"{first.path}: input is {input.dtype}, the weight {linear.weight.dtype}; "
            "cast one, or use torch.autocast"
        )
    rows = input.reshape(-1, first.in_features)
    parameters = running.parameters()
    training = torch.is_grad_enabled() and (
        rows.requires_grad or any(parameter.requires_grad for parameter in parameters)
    )
    if 0 in rows.shape:
        out = _empty(running, rows.to(dtype))
    else:
        out = ChainGemms.apply(
            rows,
            dtype,
            running.state.handle,
            running.place,
            not running.chain.prologue.identity,
            training,
            *parameters,
        )
    # As F.linear does: a plain view of a custom function's output refuses in-place ops.
    out = torch.ops.aten._unsafe_view(out, [*input.shape[:-1], running.chain.links[-1].out_features])
    if not torch.compiler.is_compiling():
        running.last = out.data_ptr()
    return out


def _expect(running: RunningChain, input: torch.Tensor) -> None:
    """Whether an inner module is called as recorded: on what the chain's first module has computed."""
    if torch.compiler.is_compiling() or not input.numel() or input.data_ptr() == running.last:
        return
    chain = running.chain
    raise NotConverted(
        f"a module inside the chain at {chain.name} was called on another tensor than the chain's result",
        why=[f"{chain.paths[0]} computes all of {', '.join(chain.paths)}; they cannot run by themselves"],
        way_out="call them one after the other as when probing; or loka.revert(model), and plan with "
        f"Budget(keep=({chain.name!r},))",
    )


def _empty(running: RunningChain, rows: torch.Tensor) -> torch.Tensor:
    """No rows: nothing to compute, but every parameter gets a gradient of zeros, as from nn.Linear."""
    out = rows
    for place in range(len(running.chain.links)):
        out = nn.functional.linear(out, running.linear(place).weight.to(out.dtype))
    for parameter in running.parameters():
        out = out + parameter.sum().to(out.dtype)  # nothing, to no rows, but a gradient to the parameter
    return out


def _chained(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"Chained{cls.__name__}", (Chained, cls), {"__module__": __name__})


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    cls: _chained(cls)
    for cls in (
        nn.Linear, BlockNorm, nn.LayerNorm, nn.RMSNorm,
        nn.Hardswish, nn.ReLU, nn.SiLU, nn.GELU, nn.Identity, nn.Dropout,
    )
}  # fmt: skip
for _class in _CLASSES.values():  # where pickle looks for them
    setattr(sys.modules[__name__], _class.__name__, _class)


def form_chains(
    model: nn.Module,
    chains: Sequence[tuple[Chain, str, Mapping[str, str]]],
    crosses: Sequence[tuple[CrossStack, str, Mapping[str, str]]] = (),
) -> ChainState:
    """Makes `chains` and stacks of cross layers run as a whole in `model`, in place: (chain, recipe,
    GEMM kernels by site) each; one at least.

    What is to share scales' and weights' launches is formed together. A site that the
    mapping lacks runs `default_kernels`.

    Raises:
        NotConverted: a module is chained already, or is not of the class that a chain takes; or a
            chain is of no kind that the fused path can run. Nothing was changed then.
        UnknownName: a recipe or kernel that does not exist.
    """
    modules = dict(named_modules(model))
    found = _found(modules)
    formed: list[tuple[Chain, ChainRecipe, Mapping[str, str], frozenset[str], Mapping[str, str]]] = []
    for chain, recipe_name, kernels in chains:
        recipe = chain_recipe_named(recipe_name)
        _check(chain, found)
        device = found(chain.name).weight.device
        complete = {**default_kernels(chain, recipe, device), **kernels}
        for link in chain.links:
            for gemm in Gemm:
                _check_kernel(chain, link, gemm, complete[site_name(link.path, gemm)])
        serving = {
            site: name
            for site, name in _fused_kernels(chain, recipe, device, training=False).items()
            if site not in kernels
        }
        formed.append((chain, recipe, complete, frozenset(kernels), serving))
    prepared = [prepare(stack, recipe, kernels, found) for stack, recipe, kernels in crosses]
    state = ChainState(formed, found, prepared)
    for stack in state.crosses:
        swap(stack, found)
    join_readers(state.crosses, state.chains, modules)
    for running in state.chains:
        for place, path in enumerate(running.chain.paths):
            module = found(path)
            module.__dict__["loka_was"] = type(module)
            module.__dict__["loka_chain"] = None if place else running
            module.__dict__["loka_inside"] = running
            module.__class__ = _CLASSES[type(module)]
    return state


def _found(modules: Mapping[str, nn.Module]) -> Callable[[str], Any]:
    def find(path: str) -> Any:
        if path not in modules:
            raise NotConverted(f"the model has no module {path!r}", way_out="find or probe its chains again")
        return modules[path]

    return find


def _check(chain: Chain, found: Callable[[str], Any]) -> None:
    reasons = []
    for path in chain.paths:
        module = found(path)
        if type(module) not in _CLASSES:
            reasons.append(f"{path} is a {type(module).__name__}")
    reason = objection(chain)
    if reason:
        reasons.append(reason)
    if not reasons:
        reasons = _differences(chain, found)
    if reasons:
        raise NotConverted(
            f"cannot form the chain at {chain.name}",
            why=reasons,
            way_out="revert the model first, or leave this chain out of the plan",
        )


def _differences(chain: Chain, found: Callable[[str], Any]) -> list[str]:
    """What its modules compute now, if that is not what was recorded."""
    reasons = []
    for path in chain.paths:
        module = found(path)
        if foreign_hooks(vars(module), ""):
            reasons.append(f"{path} has hooks that are not LoKA's")
        if "forward" in vars(module):
            reasons.append(f"the forward of {path} was replaced")
    parts = [Part(path=path, module=found(path)) for path in chain.paths]
    if not reasons and tuple(join(parts)) != (chain,):
        reasons.append(f"{', '.join(chain.paths)} are no longer {chain.describe()}")
    return reasons


def objection(chain: Chain) -> str | None:
    """Why the fused path cannot run this chain on any device, or None."""
    stages = [(chain.prologue, chain.links[0].in_features)]
    stages += [(link.epilogue, link.out_features) for link in chain.links]
    for epilogue, features in stages:
        reason = unsupported(epilogue, features)
        if reason:
            return reason
    return None


def pointless(chain: Chain, recipe: ChainRecipe) -> str | None:
    """Why `recipe` makes nothing of this chain that another one does not, or None."""
    if not recipe.z8 or any(
        may_round(link.epilogue, link.out_features, bias=link.bias) for link in chain.links
    ):
        return None
    return "nothing in it can be kept in eight bits"


def default_kernels(chain: Chain, recipe: ChainRecipe, device: torch.device) -> dict[str, str]:
    """By site: what runs where nothing was measured, for bf16 (autocast counts).

    As `plain_kernels`, but on Hopper the GEMM with the producer in its epilogue where there is one.
    """
    return {**plain_kernels(chain, recipe, device), **_fused_kernels(chain, recipe, device, training=True)}


def _fused_kernels(
    chain: Chain, recipe: ChainRecipe, device: torch.device, *, training: bool
) -> dict[str, str]:
    if device.type != "cuda":
        return {}
    fused, target = f"{FUSED_GEMM}:{recipe.gemm_recipe(Gemm.OUTPUT)}", target_of(device)
    noted = training or recipe.current
    links = [k for k in chain.links if fused_objection(chain, k, target, training=noted) is None]
    return {site_name(link.path, Gemm.OUTPUT): fused for link in links}


def fused_objection(chain: Chain, link: Link, target: str, *, training: bool = True) -> str | None:
    """Why the GEMM with a producer in its epilogue cannot run this link, or None.

    Serving with delayed scales needs no maximum: for that and nothing else `training` is False.
    """
    if link.bias:
        return "the linear layer has a bias"
    if link.epilogue.identity:
        return "nothing follows the linear layer that could be fused"
    unbounded = link is not chain.links[-1] and link.epilogue.bound(link.out_features) is None
    if training and unbounded:
        return "what it produces has no bound, and its scale needs the maximum"
    return fused_unsupported(link.epilogue, columns=link.out_features, inner=link.in_features, target=target)


def _check_kernel(chain: Chain, link: Link, gemm: Gemm, name: str) -> None:
    if not name.startswith(FUSED_GEMM):
        candidate_named(name)
        return
    reason = "it computes `output` only" if gemm is not Gemm.OUTPUT else fused_objection(chain, link, "cpu")
    if reason is not None:
        raise NoKernelFits(
            f"{name} cannot run {site_name(link.path, gemm)}", why=[reason], way_out="name another kernel"
        )


def dissolve_chains(model: nn.Module) -> None:
    """Undoes `form_chains`; nothing of it stays on the modules."""
    for module in unwrap(model).modules():
        if isinstance(module, Crossed):
            restore(module)
        elif isinstance(module, Chained):
            was = module.loka_was
            for name in ("loka_was", "loka_chain", "loka_inside"):
                del module.__dict__[name]
            module.__class__ = was  # type: ignore[assignment]


def running_chains(model: nn.Module) -> dict[str, RunningChain]:
    """The chains that run in `model`, by name."""
    heads = [m.loka_chain for m in unwrap(model).modules() if isinstance(m, Chained) and m.loka_chain]
    return {running.chain.name: running for running in heads}


def runs_fused(model: nn.Module) -> bool:
    """Whether a chain or a stack of cross layers runs in `model`."""
    return any(isinstance(module, Chained | Crossed) for module in unwrap(model).modules())


def chain_states(model: nn.Module) -> list[ChainState]:
    """What the chains of `model` share: one state for all that were formed together."""
    states = [m.loka_inside.state for m in unwrap(model).modules() if isinstance(m, Chained)]
    states += [running.state for running in running_crosses(model).values()]
    return list({id(state): state for state in states}.values())


def chain_snapshot(model: nn.Module) -> dict[str, dict[str, float]]:
    """Scales by name ("fc1/input", "fc1/weight", "fc1/grad_output"): {scale, amax, saturated, underflowed}.

    Delayed ones; of chains with current scales what the largest of 16 steps would give. Empty without
    chains. Reading it synchronizes."""
    return {name: slot for state in chain_states(model) for name, slot in state.book.snapshot().items()}


def forget_weights(model: nn.Module) -> None:
    """The next forward quantizes all weights of chains anew, with scales of their own maxima.

    For writes that PyTorch does not version: through `parameter.data`, or by a collective.
    """
    for state in chain_states(model):
        state.bank.forget()


def count_rounding(model: nn.Module, enabled: bool = True) -> None:
    """Whether chains count what saturates and what is rounded to zero (`chain_snapshot`), from now on.

    Off by default: counting takes a tenth of a producer's time. A CUDA graph keeps the setting that
    it was captured with.
    """
    for state in chain_states(model):
        state.book.counting = enabled
