"""A plan for a package keeps to what runs without loka, and says what that costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reports import layer_report, measured

import loka
from loka.core.recipe import Gemm
from loka.kernels.gemm.registry import candidate_named


def test_planning_for_a_package() -> None:
    assert candidate_named("torch:blockwise_e4m3").unpackaged
    assert candidate_named("torch_fast:rowwise_e4m3").unpackaged is None
    candidates = {
        "cublaslt:tensorwise_e4m3": measured(30, 40.0),
        "torch:rowwise_e4m3": measured(30, 60.0),
        "torch:blockwise_e4m3": measured(30, 50.0),
    }
    report = layer_report({Gemm.OUTPUT: candidates, Gemm.GRAD_INPUT: candidates})
    assert loka.plan(report).decisions["fc/output"].candidate == "cublaslt:tensorwise_e4m3"
    plan = loka.plan(report, target="package")
    decision = plan.decisions["fc/output"]
    assert decision.candidate == "torch:rowwise_e4m3"
    assert "cannot go into a package" in decision.rejected["torch:blockwise_e4m3"]
    told = "\n".join(plan.notes)
    assert "fc/output would run cublaslt:tensorwise_e4m3 in Python, and runs torch:rowwise_e4m3" in told
    assert "GEMMs of the package take 120 us, in Python they would take 80 us" in told
    with pytest.raises(loka.LokaError, match="no target is called"):
        loka.plan(report, target="cpp")
    nothing = layer_report({Gemm.OUTPUT: {"cublaslt:tensorwise_e4m3": measured(30, 40.0)}})
    assert loka.plan(nothing, target="package").decisions["fc/output"].candidate == "hp"
    untimed = replace(nothing, sites={})
    assert "package take" not in "\n".join(loka.plan(untimed, target="package").notes)
