"""What the arms of a validation do to a fresh model before it trains: a plan, a recipe, or the naive way.

Recipes here are put on every linear layer, the logit layer too, without asking what it costs; that is what
a plan is compared with. On a GPU each GEMM runs the first exact kernel that supports it, else the
emulated one, so that the precision is what the name says.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loka.core.exceptions import LokaError, NoKernelFits
from loka.core.problem import dtype_name, linear_problem, target_of
from loka.core.recipe import RECIPES, Gemm
from loka.core.records.plan import Plan
from loka.core.storage.files import digest_of
from loka.graph.attach import attach
from loka.kernels.gemm.registry import all_candidates
from loka.nn.linears import find_linears, signature
from loka.nn.site_ops import Candidates
from loka.nn.unwrap import device_of
from loka.planner.convert import check, convert

NAIVE = "naive"
NUDGED = "nudged"
_NUDGE = 1e-4  # of each weight, in standard deviations: bf16 resolves 4e-3
_FIRST = ("torch", "torchao", "fbgemm", "deep_gemm")  # exact accumulation; others follow by name


@dataclass(frozen=True, kw_only=True)
class ArmSpec:
    """An arm of a validation.

    `apply` changes a fresh model on its device, in place; `identity` are JSON values that differ where
    `apply` does, so that finished runs of another arm are never taken for this one's. `limited`: segments with a
    limit in its plan. `check` raises what `apply` would raise of a model, and leaves it as it is; None: nothing can
    be told before.
    """

    name: str
    apply: Callable[[nn.Module], object]
    identity: Mapping[str, Any]
    limited: tuple[str, ...] = ()
    check: Callable[[nn.Module], object] | None = None


def title_of(arm: str, task: str) -> str:
    """The name of an arm, with the task where there are several."""
    return f"{arm}, {task}" if task else arm


def key_of(arm: ArmSpec, task: str) -> str:
    """A digest of what the arm does, as `ArmVerdict.key` has it."""
    return digest_of({**arm.identity, "task": task} if task else dict(arm.identity))[:16]


def by_plan(plan: Plan, *, name: str = "plan") -> ArmSpec:
    """The model as `loka.convert(model, plan)` makes it."""
    digest = digest_of(plan.to_json())
    limited = tuple(plan.budget.segments)
    return ArmSpec(
        name=name,
        apply=lambda model: convert(model, plan),
        identity={"plan": digest},
        limited=limited,
        check=lambda model: check(model, plan),
    )


def by_recipe(name: str, *, rows: int) -> ArmSpec:
    """Every linear layer by one recipe; "naive": tensor scales, e4m3 with e5m2 gradients, as FP8 is
    usually switched on (torchao "tensorwise", TransformerEngine HYBRID).

    `rows` is the size of a batch, which kernels are chosen for.

    Raises:
        LokaError: no such recipe; the known ones are listed.
    """
    recipes = _recipes(name)

    def chosen(model: nn.Module) -> dict[str, Candidates]:
        device = device_of(model)
        linears, _ = find_linears(model)
        found = {
            path: tuple(_candidate(gemm, recipes[gemm], linear, rows, device) for gemm in Gemm)
            for path, linear in linears.items()
        }
        return {path: (names[0], names[1], names[2]) for path, names in found.items()}

    def apply(model: nn.Module) -> None:
        attach(model, signature(model).layers, chosen(model))

    identity = {"recipes": {gemm.value: recipe for gemm, recipe in recipes.items()}}
    return ArmSpec(name=name, apply=apply, identity=identity, check=chosen)


def nudged() -> ArmSpec:
    """The control once more, its initial weights times 1 + 1e-4 z: an A/A arm, whose true difference is 0.

    What it scatters is what training makes of no change at all.
    """

    @torch.no_grad()
    def apply(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(0)
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator).to(weight.device, weight.dtype)
            weight.mul_(1 + _NUDGE * noise)

    return ArmSpec(name=NUDGED, apply=apply, identity={"nudge": _NUDGE})


def arm_named(text: str, *, rows: int) -> ArmSpec:
    """A plan file, the name of a recipe, "naive", or "nudged"; `rows` as in `by_recipe`.

    Raises:
        LokaError: neither; the known names are listed.
        FileRefused: the plan file is missing, truncated or edited.
    """
    path = Path(text)
    if path.suffix == ".json" or path.exists():
        return by_plan(Plan.load(path), name=path.stem)
    return nudged() if text == NUDGED else by_recipe(text, rows=rows)


def _recipes(name: str) -> dict[Gemm, str]:
    if name == NAIVE:
        gradients = "tensorwise_e5m2"
        return {Gemm.OUTPUT: "tensorwise_e4m3", Gemm.GRAD_INPUT: gradients, Gemm.GRAD_WEIGHT: gradients}
    whole = [recipe for recipe in RECIPES.values() if all(recipe.casts(gemm) for gemm in Gemm)]
    if name not in {recipe.name for recipe in whole}:
        known = ", ".join([NAIVE, NUDGED, *(recipe.name for recipe in whole)])
        raise LokaError(f"no arm is called {name!r}", way_out=f"a plan file (.json), or one of {known}")
    return dict.fromkeys(Gemm, name)


def _candidate(gemm: Gemm, recipe: str, linear: nn.Linear, rows: int, device: torch.device) -> str:
    """The candidate by which an arm runs `recipe` at one GEMM: no emulation where a kernel runs, then by `_FIRST`.

    Raises NoKernelFits where no kernel runs the recipe there.
    """
    problem = linear_problem(
        gemm,
        rows=rows,
        in_features=linear.in_features,
        out_features=linear.out_features,
        dtype=dtype_name(torch.bfloat16),
        target=target_of(device),
    )
    order = {name: place for place, name in enumerate(_FIRST)}
    fitting = [
        c
        for c in all_candidates()
        if c.recipe.name == recipe and not c.kernel.fast and not c.on_request and not c.unsupported(problem)
    ]
    if not fitting:
        raise NoKernelFits(f"no kernel runs {recipe} at {problem}", way_out="another recipe")
    best = min(fitting, key=lambda c: (c.kernel.emulates, order.get(c.kernel.name, len(order)), c.name))
    return best.name
