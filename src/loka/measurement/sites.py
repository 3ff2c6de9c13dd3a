"""Which GEMMs of a layer run in training, and the problems that they are."""

from loka.core.problem import Problem, linear_problem
from loka.core.recipe import Gemm
from loka.core.records.report import Report, site_name
from loka.core.records.stats import LinearStats


def gemms_of(path: str, layer: LinearStats) -> tuple[list[Gemm], dict[str, str]]:
    """The GEMMs that run in training, and why another does not."""
    empty = [name for name, learnt in layer.operands.items() if name != "weight" and not learnt.numbers["count"]]
    if empty:
        reason = f"no finite row of {' or '.join(empty)} was seen, so there is nothing to draw from"
        return [], {site_name(path, gemm): reason for gemm in Gemm}
    if zero := [name for name in ("input", "weight") if _zero(layer, name)]:
        reason = f"every {' and '.join(zero)} that was probed was zero, which says nothing of others"
        return [], {site_name(path, gemm): reason for gemm in Gemm}
    if beyond := [name for name in layer.operands if _beyond(layer, name)]:
        reason = f"squares of {' and '.join(beyond)} are no float32 numbers (too large, or below 1e-18): scale it"
        return [], {site_name(path, gemm): reason for gemm in Gemm}
    skipped = {}
    if not layer.needs_input_grad:
        skipped[site_name(path, Gemm.GRAD_INPUT)] = "its input needs no gradient, so it never runs"
    if not layer.needs_weight_grad:
        skipped[site_name(path, Gemm.GRAD_WEIGHT)] = "its weight is frozen, so it never runs"
    unreached = "grad_output" not in layer.operands
    wanted = [gemm for gemm in (Gemm.GRAD_INPUT, Gemm.GRAD_WEIGHT) if site_name(path, gemm) not in skipped]
    if wanted and (unreached or _zero(layer, "grad_output")):
        reason = (
            "no gradient reached this layer while it was probed (or it is in a reentrant checkpoint, takes nested "
            "tensors, or multiplies inside of an autograd.Function, whose backward runs as it is written)"
            if unreached
            else "every gradient that was probed was zero, which says nothing of others"
        )
        return [Gemm.OUTPUT], skipped | {site_name(path, gemm): reason for gemm in wanted}
    return [Gemm.OUTPUT, *wanted], skipped


def _zero(layer: LinearStats, operand: str) -> bool:
    learnt = layer.operands[operand]
    if operand == "weight":  # such as LoRA's B before training; the mean over snapshots of others is not all zeros
        return "mean" in learnt.tensors and not bool(learnt.tensors["mean"].any())
    return learnt.numbers.get("zero_fraction") == 1.0  # of made-up operands nobody counted zeros


def _beyond(layer: LinearStats, operand: str) -> bool:
    """Whether its spread was lost: the error of draws without one is not the operand's."""
    learnt = layer.operands[operand].tensors
    if not {"amax", "square"} <= learnt.keys():  # made up
        return False
    return not bool(learnt["square"].isfinite().all()) or 0 < float(learnt["amax"].max()) < 1e-18


def problem_of(path: str, layer: LinearStats, report: Report, gemm: Gemm) -> Problem:
    shape = report.model.layers[path]
    return linear_problem(
        gemm,
        rows=layer.rows,
        in_features=shape.in_features,
        out_features=shape.out_features,
        # A gradient of float32 weights is wanted in float32, whatever autocast computes in.
        dtype=layer.weight_dtype if gemm is Gemm.GRAD_WEIGHT else layer.dtype,
        target=report.machine.target,
    )
