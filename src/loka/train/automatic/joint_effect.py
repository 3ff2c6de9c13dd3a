"""Does the sum hold? A plan's predicted effect beside what all its FP8 GEMMs do together.

    KL = mean_i sum_t [ p_it (z_it - z'_it) + ln(1 + e^z'_it) - ln(1 + e^z_it) ]
    joint effect = KL / H,      H = sum_t h(mean_i p_it or base rate),  h(q) = -q ln q - (1 - q) ln(1 - q)

z are the logits of the model as it is, z' those with every FP8 `output` GEMM of the plan emulated, on the
same rows. KL is the loss that a calibrated model's labels would add, without the noise of labels: it
resolves effects far below those that a difference of two losses can. Effects of sites are summed by the
planner; where together they do something else, the ratio says so. It needs no FP8 hardware: operands are
rounded exactly, and what tensor cores accumulate less exactly is left out.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from loka.core.error import Estimate, estimate_mean
from loka.core.exceptions import DataRefused, NonFinite, NotConverted, PlanMismatch, UnknownName
from loka.core.numerics.label_rate import entropy, require_shares, task_rates
from loka.core.records.parts import WHOLE
from loka.core.records.plan import Plan, require_plan
from loka.core.records.report import HP
from loka.core.signature import AS_PROBED, LinearShape
from loka.data.batch import Batch
from loka.graph.attach import attach, detach
from loka.nn.linears import signature
from loka.nn.site import site_forwards
from loka.probe.model_effects.untouched import evaluating
from loka.train.steps.forward import arguments

ADDITIVE = (0.6, 1.6)
"""Joint effect over predicted sum: beyond it the sum is not to be trusted (docs/budget.md)."""

Forward = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class JointEffect:
    """`measured` is the plan's joint effect as KL/H on `rows` rows, with the interval of the choice of rows;
    `predicted` the plan's sum. `unknown` names FP8 sites that the sum lacks."""

    measured: Estimate
    predicted: Estimate | None
    budget: float | None
    rows: int
    sites: int
    unknown: tuple[str, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing was predicted."""
        if self.predicted is None or not self.predicted.value > 0:
            return None
        return self.measured.value / self.predicted.value

    @property
    def additive(self) -> bool | None:
        """Whether the sum holds within `ADDITIVE`; None where there is no whole sum to compare with."""
        if self.ratio is None or self.unknown:
            return None
        return ADDITIVE[0] <= self.ratio <= ADDITIVE[1]

    @property
    def within(self) -> bool | None:
        """Whether the joint effect itself, at its upper end, keeps the plan's budget; None without one."""
        return None if self.budget is None else self.measured.high <= self.budget

    def __str__(self) -> str:
        lines = [f"joint effect of {self.sites} output GEMMs in eight bits on {self.rows} rows: KL/H {self.measured}"]
        if self.predicted is not None and self.ratio is not None:
            verdict = {
                True: f"additive: within {ADDITIVE[0]} and {ADDITIVE[1]}",
                False: f"NOT additive: outside of {ADDITIVE[0]} to {ADDITIVE[1]}; go by the joint effect, "
                "and probe again (docs/budget.md)",
                None: f"the sum lacks {', '.join(self.unknown)}",
            }[self.additive]
            lines.append(f"predicted sum: {self.predicted}; joint over sum {self.ratio:.2f}, {verdict}")
        if self.within is not None:
            lines.append(f"{'within' if self.within else 'ABOVE'} the budget of {self.budget:g}")
        return "\n".join(lines)


def joint_effect(
    model: nn.Module,
    plan: Plan,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    base_rate: float | Sequence[float] | None = None,
    part: str = WHOLE,
) -> JointEffect:
    """Runs `model` on each batch as it is and with the plan's FP8 `output` GEMMs emulated.

    Best on rows that it was not trained on, some thousand of them. The model runs in eval mode, in
    the dtype it is in, and is put back as it was.

    Args:
        batches: of one device with the model; `data.Batch`, or whatever `forward` takes.
        forward: (model, batch) -> logits [B] or [B, T]; as in training by default.
        base_rate: share of positive labels, for the entropy that KL is relative to; by default that of the
            mean prediction. Give it what the effects were given: one share, or one for each task.
        part: the task or segment, by the name that the plan has for it, which `batches` and the logits of
            `forward` are of alone; what was predicted and allowed there is then compared.

    Raises:
        PlanMismatch: the plan was made for another model.
        NotConverted: the model runs a plan already; there is nothing unquantized to compare with.
        NonFinite: a logit is NaN or infinite.
        UnknownName: the plan has no such `part`.
        DataRefused: no batch, or one without rows; an output that is no tensor of logits, or all of whose
            values lie between 0 and 1, which are probabilities; predictions without entropy.
        ValueError: a base rate that is no share.
    """
    require_plan(plan)
    require_shares(base_rate)
    candidates = {path: f"emulated:{recipe}" for path, recipe in plan.output_recipes.items()}
    differences = signature(model, like=plan.model).differences(plan.model)
    if differences:
        raise PlanMismatch(
            f"this plan was made for {plan.model.name} with other linear layers", why=differences, way_out=AS_PROBED
        )
    if site_forwards(model):
        raise NotConverted("this model already runs a plan", way_out="loka.revert(model) first")
    known = dict.fromkeys((WHOLE, *plan.limits, *(name for d in plan.decisions.values() for name in d.kl_by_part)))
    if candidates and part not in known:
        raise UnknownName(
            f"the plan knows no KL/H of the part {part!r}",
            way_out=f"one of {', '.join(map(repr, known))} ('' is all rows)",
        )
    run = forward or _by_batch
    divergences, logits = [], []
    with evaluating(model), torch.no_grad():
        for batch in batches:
            plain = _logits(run(model, batch))
            with emulated(model, candidates, plan.model.layers, plan.centres, plan.hot_columns):
                quantized = _logits(run(model, batch))
            divergences.append(_divergence(plain, quantized))
            logits.append(plain)
    if not divergences:
        raise DataRefused("there was no batch to evaluate the plan on", way_out="pass at least one")
    rows, plain = torch.cat(divergences), torch.cat(logits)
    if len(rows) > 1 and bool(((plain >= 0) & (plain <= 1)).all()):
        raise DataRefused(
            f"all {plain.numel()} outputs lie between 0 and 1",
            why=["those are probabilities; their sigmoid would make the effect many times too small"],
            way_out="give forward= that returns logits, such as lambda model, x: model(x).logit()",
        )
    rates = plain.sigmoid().mean(dim=0).tolist()
    if base_rate is not None:
        rates = list(task_rates(base_rate, plain.shape[1]).shares)
    of_labels = sum(entropy(rate) for rate in rates)
    if not of_labels > 0:
        raise DataRefused(
            "the predictions have no entropy, so KL/H is not defined on these rows",
            why=["the share of positives, by the predictions or by base_rate=, is 0 or 1 for every task"],
            way_out="train the model further, or give rows with clicks and without",
        )
    return JointEffect(
        measured=_mean(rows / of_labels),
        predicted=plan.kl_of(part),
        budget=plan.limits.get(part) if plan.limits else plan.kl_limit,
        rows=len(rows),
        sites=len(candidates),
        unknown=plan.kl_unknown_of(part),
    )


@contextmanager
def emulated(
    model: nn.Module,
    outputs: Mapping[str, str],
    layers: Mapping[str, LinearShape] | None = None,
    centres: Mapping[str, Sequence[float]] | None = None,
    hot_columns: Mapping[str, Sequence[int]] | None = None,
) -> Iterator[None]:
    """Within it the `output` GEMMs of `outputs` run by these candidates, everything else in hp.

    `layers`: the model's sites; its linear layers by default. `centres`: what centred recipes take off.
    `hot_columns`: those of hot recipes.
    """
    chosen = {path: (candidate, HP, HP) for path, candidate in outputs.items()}
    attach(model, layers or signature(model).layers, chosen, centres=centres, hot_columns=hot_columns)
    try:
        yield
    finally:
        detach(model)


def _by_batch(model: nn.Module, batch: Any) -> torch.Tensor:
    if not (hasattr(batch, "dense") and hasattr(batch, "sparse")):
        raise DataRefused(
            f"a batch is a {type(batch).__name__}, which has no `dense` and `sparse`",
            way_out="say how the model takes it, such as forward=lambda model, batch: model(batch)",
        )
    return model(*arguments(batch)) if isinstance(batch, Batch) else model(batch.dense, batch.sparse)


def _logits(output: object) -> torch.Tensor:
    """[B, T] float64."""
    if not isinstance(output, torch.Tensor) or output.dim() == 0:
        what = "one number" if isinstance(output, torch.Tensor) else f"a {type(output).__name__}"
        raise DataRefused(
            f"the model returned {what}, not the logits [B] or [B, T] of a batch",
            way_out='give forward= that returns them, such as lambda model, batch: model(batch)["click"]',
        )
    if output.numel() == 0:
        raise DataRefused("a batch has no rows", way_out="leave empty batches out")
    logits = output.double()
    if not bool(torch.isfinite(logits).all()):
        raise NonFinite("a logit is NaN or infinite", way_out="check the model on these rows without a plan")
    return logits.reshape(logits.shape[0], -1)


def _divergence(plain: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    """KL of each row [B], summed over tasks."""
    shift = plain.sigmoid() * (plain - quantized)
    return (shift + functional.softplus(quantized) - functional.softplus(plain)).sum(dim=1).clamp_min(0)


def _mean(values: torch.Tensor) -> Estimate:
    found = estimate_mean(values.tolist())
    alone = len(values) == 1 or 0 < found.value <= values.min().item() * (1 + 1e-9)  # copies of a row are one
    return Estimate(found.value, 0.0, math.inf) if alone else found
