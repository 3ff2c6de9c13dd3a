import math

import pytest

from loka.core.budget import Budget
from loka.core.device import fingerprint
from loka.core.error import Estimate
from loka.core.problem import linear_problem
from loka.core.recipe import Gemm
from loka.core.records.plan import Decision, Plan
from loka.core.signature import LinearShape, ModelSignature

LOW = "emulated:rowwise_e4m3"
KNOWN, WILD = Estimate(1e-5, 0.0, 2e-5), Estimate(1e-5, 0.0, math.inf)


def plan(*effects, candidate=LOW, ne=None):
    shape = LinearShape(in_features=8, out_features=8, bias=False)
    layers = {f"layer{place}": shape for place in range(len(effects))}
    problem = linear_problem(Gemm.OUTPUT, rows=8, in_features=8, out_features=8, dtype="bfloat16", target="cpu")
    decisions = [
        Decision(path=path, problem=problem, candidate=candidate, reason="", kl=effect)
        for path, effect in zip(layers, effects, strict=True)
    ]
    return Plan(
        model=ModelSignature(name="Net", layers=layers),
        machine=fingerprint("cpu"),
        budget=Budget(ne=ne),
        timed=False,
        decisions={decision.site: decision for decision in decisions},
    )


def told(plan):
    return plan.summary().partition("no speed is claimed.")[2]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (plan(None), ""),
        (plan(None, candidate="hp", ne=1e-4), ""),
        (plan(None, None, ne=1e-4), " Predicted KL/H: unknown, 2 without an estimate; the budget is 0.0001."),
        (plan(WILD), " Predicted KL/H: unknown, 1 without an estimate."),
        (plan(KNOWN), f" Predicted KL/H: {KNOWN}."),
        (plan(KNOWN, None), f" Predicted KL/H: {KNOWN}, and 1 without an estimate."),
        (plan(KNOWN, ne=1e-4), f" Predicted KL/H: {KNOWN}; the budget is 0.0001."),
    ],
)
def test_what_is_known_or_was_asked_for_is_told(made, says):
    assert told(made) == says
