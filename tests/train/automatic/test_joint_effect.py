import math

import pytest
import torch
from torch import nn

import loka
from loka.core.budget import Budget
from loka.core.device import fingerprint
from loka.core.error import Estimate
from loka.core.exceptions import DataRefused, NonFinite, NotConverted, PlanMismatch
from loka.core.problem import linear_problem
from loka.core.recipe import Gemm
from loka.core.records.plan import Decision, Plan
from loka.data.batch import Batch
from loka.kernels.gemm.run import run_gemm
from loka.nn import sites_of
from loka.nn.linears import signature
from loka.train.automatic.joint_effect import JointEffect, joint_effect

ROW, TENSOR = "emulated:rowwise_e4m3", "emulated:tensorwise_e4m3"


def build(tasks=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, tasks))


def rows(count, seed=1):
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed)) * 3


def plan_of(model, candidates, *, ne=None):
    decisions = {}
    for path, shape in signature(model).layers.items():
        problem = linear_problem(
            Gemm.OUTPUT,
            rows=64,
            in_features=shape.in_features,
            out_features=shape.out_features,
            dtype="float32",
            target="cpu",
        )
        effect = Estimate(ne, ne, ne) if ne is not None and path in candidates else None
        decision = Decision(path=path, problem=problem, candidate=candidates.get(path, "hp"), reason="", kl=effect)
        decisions[decision.site] = decision
    return Plan(model=signature(model), machine=fingerprint("cpu"), budget=Budget(), timed=False, decisions=decisions)


def forward(model, x):
    return model(x)


def by_hand(model, x, recipes):
    h = x
    for index, module in enumerate(model):
        if isinstance(module, nn.Linear) and index in recipes:
            h = run_gemm(recipes[index], h, module.weight, gemm=Gemm.OUTPUT, dtype=torch.float32)
            h = h + module.bias
        else:
            h = module(h)
    return h


@pytest.mark.parametrize("tasks", [1, 3])
def test_it_is_the_divergence_over_the_entropy(tasks):
    model, x = build(tasks), rows(256)
    found = joint_effect(model, plan_of(model, {"0": ROW, "4": TENSOR}), [x[:100], x[100:]], forward=forward)
    with torch.no_grad():
        first, second = x[:100], x[100:]  # scales of tensors are those of a batch
        plain = model(x).double()
        changed = torch.cat([by_hand(model, part, {0: ROW, 4: TENSOR}) for part in (first, second)]).double()
    p, q = plain.sigmoid(), changed.sigmoid()
    divergence = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum(1)
    base = p.mean(0)
    entropy = float((-base * base.log() - (1 - base) * (1 - base).log()).sum())
    # Two formulas of one number in float64; the subtraction of logarithms loses about 1e-16 of 1e-5.
    assert found.measured.value == pytest.approx(float(divergence.mean()) / entropy, rel=1e-6)
    assert found.measured.low < found.measured.value < found.measured.high
    assert (found.rows, found.sites) == (256, 2)
    assert found.measured.value > 0
    copies = joint_effect(model, plan_of(model, {"0": ROW}), [-x[:1].expand(64, -1)], forward=forward)
    assert copies.measured.high == math.inf


def test_the_model_is_put_back():
    model, x = build(), rows(64)
    model.train()
    model[1].eval()
    before = model(x)
    joint_effect(model, plan_of(model, {"0": ROW}), [x], forward=forward)
    assert not sites_of(model)
    assert torch.equal(model(x), before)
    assert [module.training for module in model] == [True, False, True, True, True]

    def broken(model, x):
        if sites_of(model):
            raise RuntimeError("in the middle")
        return model(x)

    with pytest.raises(RuntimeError, match="in the middle"):
        joint_effect(model, plan_of(model, {"0": ROW}), [x], forward=broken)
    assert not sites_of(model)
    assert model.training


def test_nothing_in_fp8_costs_nothing():
    model = build()
    assert joint_effect(model, plan_of(model, {}), [rows(64)], forward=forward).measured.value == 0


def test_the_gate():
    def made(measured, predicted, **others):
        return JointEffect(
            measured=Estimate(measured, measured * 0.9, measured * 1.1),
            predicted=None if predicted is None else Estimate(predicted, predicted, predicted),
            budget=others.pop("budget", None),
            rows=100,
            sites=2,
            **others,
        )

    assert made(1.5e-5, 1e-5).additive
    assert "in eight bits" in str(made(1.5e-5, 1e-5))
    assert "additive: within" in str(made(1.5e-5, 1e-5))
    assert made(1.7e-5, 1e-5).additive is False
    assert made(0.5e-5, 1e-5).additive is False
    assert "NOT additive" in str(made(0.5e-5, 1e-5))
    assert made(1e-5, None).additive is None
    assert made(1e-5, 1e-5, unknown=("a/output",)).additive is None
    assert "lacks a/output" in str(made(1e-5, 1e-5, unknown=("a/output",)))
    assert made(1e-5, 1e-5, budget=1.2e-5).within
    assert made(1e-5, 1e-5, budget=1.05e-5).within is False, "its upper end is 1.1e-5"
    assert "ABOVE the budget" in str(made(1e-5, 1e-5, budget=1.05e-5))


def test_sites_run_by_the_recipes_of_the_plan():
    model = build()
    plan = plan_of(model, {"0": TENSOR, "2": ROW, "4": "cublaslt:rowwise_e4m3@3"})
    assert plan.output_recipes == {"0": "tensorwise_e4m3", "2": "rowwise_e4m3", "4": "rowwise_e4m3"}


def test_what_cannot_be_compared_is_refused():
    model = build()
    plan = plan_of(model, {"0": ROW})
    with pytest.raises(PlanMismatch, match="other linear layers"):
        joint_effect(nn.Sequential(nn.Linear(32, 8)), plan, [rows(8)], forward=forward)
    with pytest.raises(DataRefused, match="no batch"):
        joint_effect(model, plan, [], forward=forward)
    with pytest.raises(NonFinite):
        joint_effect(model, plan, [rows(8) * math.nan], forward=forward)
    loka.convert(model, plan)
    with pytest.raises(NotConverted, match="revert"):
        joint_effect(model, plan, [rows(8)], forward=forward)


def test_probabilities_are_not_taken_for_logits():
    """They would be squeezed into 0.5 to 0.73, and the effect with them."""
    model, x = build(), rows(256)
    plan = plan_of(model, {"0": ROW})

    def probabilities(model, x):
        return model(x).sigmoid()

    with pytest.raises(DataRefused, match=r"give forward= that returns logits"):
        joint_effect(model, plan, [x], forward=probabilities)
    back = joint_effect(model, plan, [x], forward=lambda model, x: model(x).sigmoid().double().logit())
    # The sigmoid rounds to float32 within 6e-8 of p, the differences by FP8 are some 1e-2 of a logit.
    assert back.measured.value == pytest.approx(
        joint_effect(model, plan, [x], forward=forward).measured.value, rel=1e-3
    )


def test_a_known_base_rate_sets_the_entropy():
    model, x = build(3), rows(256)
    plan = plan_of(model, {"0": ROW})
    fair, rare = (joint_effect(model, plan, [x], forward=forward, base_rate=q) for q in (0.5, 0.03))
    assert rare.measured.value / fair.measured.value == pytest.approx(
        math.log(2) / -(0.03 * math.log(0.03) + 0.97 * math.log(0.97))
    )
    for wrong in (0, 1, math.nan):
        with pytest.raises(ValueError, match="base_rate"):
            joint_effect(model, plan, [x], forward=forward, base_rate=wrong)


@pytest.mark.parametrize(
    ("take", "told"),
    [
        (lambda model, x: {"click": model(x)}, "returned a dict"),
        (lambda model, x: model(x).mean(), "returned one number"),
        (None, "a batch is a Tensor, which has no `dense` and `sparse`"),
    ],
)
def test_what_is_no_batch_of_logits_is_refused(take, told):
    model = build()
    with pytest.raises(DataRefused, match=told) as refused:
        joint_effect(model, plan_of(model, {"0": ROW}), [rows(8)], forward=take)
    assert "forward=" in str(refused.value)


class OfHistories(nn.Sequential):
    def forward(self, dense, sparse, sequence, lengths):
        return super().forward(dense)


def test_a_batch_goes_in_as_in_training():
    model, ids = OfHistories(*build()), torch.zeros(8, 1)
    batch = Batch(dense=rows(8), sparse=ids, label=ids, sequence=ids, lengths=ids)
    assert joint_effect(model, plan_of(model, {"0": ROW}), [batch]).rows == 8


def test_a_batch_without_rows_is_refused():
    model = build()
    with pytest.raises(DataRefused, match="no rows"):
        joint_effect(model, plan_of(model, {"0": ROW}), [rows(8), rows(0)], forward=forward)
