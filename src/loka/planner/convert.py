"""Puts a plan into a model, and takes it out again."""

import warnings
from collections.abc import Collection, Iterable
from typing import TypeVar

import torch
from torch import nn

from loka.compiler import install
from loka.compiler.joint_sites import unjoined
from loka.compiler.long_sums import LONG_SUMS, splits_long_sums
from loka.core.compiling import allow_programs
from loka.core.device import LIBRARIES, fingerprint
from loka.core.exceptions import NoKernelFits, NotConverted, PlanMismatch, WrongResults, truncated
from loka.core.problem import linear_problem
from loka.core.recipe import Gemm
from loka.core.records.plan import Decision, Plan, require_plan
from loka.core.records.report import HP
from loka.core.signature import AS_PROBED, LinearShape
from loka.graph.attach import attach, detach
from loka.kernels.gemm.registry import candidate_named, require_supported
from loka.kernels.gemm.self_check import self_check
from loka.nn.fsdp_units import cut_by_others
from loka.nn.linears import find_linears, signature
from loka.nn.site import site_forwards
from loka.nn.site_ops import Candidates
from loka.nn.unwrap import class_name

M = TypeVar("M", bound=nn.Module)

_EACH = 8  # programs of a module: of training and serving, of other numbers of rows


def convert(model: M, plan: Plan, *, regions: bool = True) -> M:
    """Makes the layers of `model` run as `plan` says, in place, and returns it.

    Under torch.compile those that the plan has in regions are joined by a pass that this adds to Inductor's
    configuration (loka/compiler); `regions=False` leaves every site by itself there too, to bisect.

    Modules that call a site with at least one FP8 GEMM get another `forward` on the instance (nn/site.py).
    The module objects and classes, parameters and `state_dict` keys stay the same, so optimizers,
    checkpoints and wrappers are not touched. All checks come first: a refused plan leaves the model as it
    was.

    Raises:
        PlanMismatch: the plan was made for another model, or measured on another machine.
        NotConverted: the model is converted already.
        NoKernelFits: a candidate of the plan cannot run here, or a weight that it would read is cut by tensor
            parallelism.
        WrongResults: a candidate of the plan fails its self-check here.
    """
    if running := site_forwards(model):
        raise NotConverted(
            "this model already runs a plan",
            why=[f"{path or 'the model itself'} runs sites" for path in running],
            way_out="loka.revert(model), then convert with the new plan; where another model shares these modules, "
            "they are reverted in that model too, so convert a copy, or one module that holds both models",
        )
    check(model, plan)
    in_fp8 = fp8_layers(plan)
    attach(model, plan.model.layers, in_fp8, join=regions, centres=plan.centres, hot_columns=plan.hot_columns)
    allow_programs(_EACH * len(site_forwards(model)))
    if regions and any(unjoined(name) is None for names in in_fp8.values() for name in names):
        install()
    return model


def check(model: nn.Module, plan: Plan, gemms: Collection[Gemm] = tuple(Gemm)) -> None:
    """Makes all the checks of `convert`, for a model that is converted or not, and changes nothing. `gemms`: those
    whose kernels are checked; a server runs `output` alone.

    Raises PlanMismatch, NoKernelFits and WrongResults as `convert` does.
    """
    _check_model(model, plan)
    low = [d for d in plan.decisions.values() if d.candidate != HP and d.problem.gemm in gemms]
    _check_machine(model, plan, low)
    _check_weights(model, plan)
    for decision in low:
        require_supported(decision.candidate, decision.problem)
    _check_results(model, low)


def _check_weights(model: nn.Module, plan: Plan) -> None:
    paths = fp8_layers(plan)
    cut = [name for name in cut_by_others(model) if name in paths or name.rpartition(".")[0] in paths]
    if cut:
        raise NoKernelFits(
            "no kernel here reads these weights: they are DTensors, and not by FSDP2 alone (tensor parallelism?)",
            why=cut,
            way_out="plan their layers in high precision (loka.plan(force={'layer/*': 'hp'})), or use FSDP2 alone",
        )


def fp8_layers(plan: Plan) -> dict[str, Candidates]:
    planned = dict.fromkeys(d.path for d in plan.decisions.values())
    chosen = {path: plan.candidates(path) for path in planned}
    return {
        path: (names[Gemm.OUTPUT], names[Gemm.GRAD_INPUT], names[Gemm.GRAD_WEIGHT])
        for path, names in chosen.items()
        if set(names.values()) != {HP}
    }


def revert(model: M) -> M:
    """Undoes `convert` in place and returns the model; the parameters keep their values.

    Raises NotConverted if there is nothing to revert.
    """
    if not site_forwards(model):
        raise NotConverted("no site of this model runs by a plan", way_out="convert it first")
    detach(model)
    return model


def _check_model(model: nn.Module, plan: Plan) -> None:
    require_plan(plan)
    differences = signature(model, like=plan.model).differences(plan.model)
    differences += [
        f"{d.site} is planned as {d.problem}, which does not fit {plan.model.layers[d.path]}"
        if d.path in plan.model.layers
        else f"{d.site} is planned, but the plan's model has no such layer"
        for d in plan.decisions.values()
        if d.path not in plan.model.layers or not _fits(d, plan.model.layers[d.path])
    ]
    if differences:
        _, left_out = find_linears(model)
        differences += [f"{path}: {why}" for path, why in left_out.items() if path in plan.model.layers]
    if differences:
        raise PlanMismatch(
            f"this plan was made for {plan.model.name} with other linear layers than this {class_name(model)} has",
            why=differences,
            way_out=AS_PROBED,
        )


def _fits(decision: Decision, shape: LinearShape) -> bool:
    problem = decision.problem
    rows = problem.k if problem.gemm is Gemm.GRAD_WEIGHT else problem.m
    wanted = linear_problem(
        problem.gemm,
        rows=rows,
        in_features=shape.in_features,
        out_features=shape.out_features,
        dtype=problem.dtype,
        target=problem.target,
    )
    return problem == wanted


def _check_machine(model: nn.Module, plan: Plan, low: Iterable[Decision]) -> None:
    here = [fingerprint(device) for device in _devices(model)]
    used = _libraries(low)
    differences = [line for machine in here for line in machine.differences(plan.machine, driver=False, libraries=used)]
    if differences:
        raise PlanMismatch(
            f"this plan was measured on {plan.machine}, not here",
            why=differences,
            way_out="measure here (`loka measure STATS`; the statistics stay valid) and plan again, "
            "or move the model to that device",
        )
    drivers = {machine.driver for machine in here} - {plan.machine.driver}
    if drivers:
        warnings.warn(
            f"this plan was timed under driver {plan.machine.driver}, here is {', '.join(sorted(drivers))}: "
            "kernels are the same and are checked; what is faster may differ (`loka measure` again tells)",
            stacklevel=3,
        )


def _libraries(low: Iterable[Decision]) -> set[str]:
    kernels = {candidate_named(d.candidate).kernel.library for d in low}
    return {LIBRARIES[name] for name in {*kernels, "triton"} if name in LIBRARIES}


def _check_results(model: nn.Module, low: Iterable[Decision]) -> None:
    """Runs the self-check of each candidate and GEMM on each device, once in a process."""
    sites: dict[tuple[str, Gemm], list[str]] = {}
    for decision in low:
        for name in _runs(decision):
            sites.setdefault((name, decision.problem.gemm), []).append(decision.site)
    evidence = []
    for device in _devices(model):
        for (name, gemm), where in sites.items():
            found = self_check(name, gemm=gemm, device=device)
            if found is not None:
                planned = " ".join(truncated(where, 1))
                evidence.append(f"{name} for {gemm} on {device} (planned at {planned}): {found}")
    if evidence:
        raise WrongResults(
            "a kernel of this plan returns wrong numbers here",
            why=evidence,
            way_out="plan again with those sites forced to 'hp' or to another candidate, or measure again, "
            "which leaves wrong kernels out; please report it with the versions that `loka doctor` prints",
        )


def _runs(decision: Decision) -> list[str]:
    """The candidates that run what was decided: by itself, and in a region, whatever number of rows it gets."""
    kernel = candidate_named(decision.candidate).kernel.name
    other = unjoined(decision.candidate) is None and splits_long_sums(kernel, decision.problem)
    return [decision.candidate, LONG_SUMS] if other else [decision.candidate]


def _devices(model: nn.Module) -> list[torch.device]:
    return list(dict.fromkeys(parameter.device for parameter in model.parameters()))
