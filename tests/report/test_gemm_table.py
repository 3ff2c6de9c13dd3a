import math

import pytest
from made_bench import FAST, TORCH, around, bench

from loka.core.error import Estimate
from loka.report.gemm_summary import (
    LOSS,
    TIE,
    WIN,
    best_library,
    geometric_mean,
    model_times,
    standings,
    verdict,
    worst,
)
from loka.report.gemm_table import gemm_table


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (Estimate(1.05, 1.02, 1.08), WIN),
        (Estimate(1.05, 1.009, 1.08), TIE),  # its interval reaches into the tie
        (Estimate(1.005, 1.004, 1.006), TIE),  # beyond noise, but within the tie
        (Estimate(0.995, 0.994, 0.996), TIE),
        (Estimate(0.95, 0.92, 0.98), LOSS),
        (Estimate(0.95, 0.90, 0.9905), TIE),
        (Estimate(0.5, -math.inf, math.inf), TIE),
    ],
)
def test_a_verdict_needs_its_whole_interval_beyond_the_tie(ratio, expected):
    assert verdict(ratio, 0.01) == expected


def test_geometric_mean_and_its_interval():
    mean = geometric_mean([around(2.0, 0.03), around(0.5, 0.04)])
    assert mean.value == pytest.approx(1.0)
    half = math.hypot(math.log(1.03), math.log(1.04)) / 2
    assert mean.low == pytest.approx(math.exp(-half))
    assert mean.high == pytest.approx(math.exp(half))
    assert geometric_mean([]) is None
    assert geometric_mean([Estimate(2.0, 0.0, math.inf)]).high == math.inf


def test_standings_count_what_ran_and_who_won():
    made = bench()
    found = standings(made, made.sites().values())
    assert list(found) == ["hp", "torch", "torch or hp", "choice"]
    assert found["choice"].speedup.value == pytest.approx((2.0 * 1.0 * 1.28) ** (1 / 3))
    assert found["torch"].speedup.value == pytest.approx((2.0 * 1.25 * 1.28) ** (1 / 3))
    assert found["torch"].versus.value == pytest.approx((1 / 1.25) ** (1 / 3))
    assert found["torch"].verdicts == {WIN: 0, TIE: 2, LOSS: 1}
    assert found["hp"].verdicts == {WIN: 2, TIE: 1, LOSS: 0}
    assert (found["choice"].fp8, found["torch"].fp8) == (2, 3)
    assert best_library(found).arm in ("torch", "torch or hp")
    assert worst(made.contests["m/fc/grad_input"], 0.01)[0] == LOSS


def test_model_times_count_layers_and_leave_out_what_is_not_whole():
    """Model m lacks its failed layer, so only n is told: one layer of 300 us, 200 by choice."""
    (n,) = model_times(bench())
    assert (n.model, n.layers) == ("n", 1)
    assert n.by_arm["hp"] == pytest.approx(300.0)
    assert n.by_arm["choice"] == pytest.approx(200.0)


def test_the_page_names_every_exception():
    text = gemm_table(bench())
    for part in (
        "GEMM suite on NVIDIA H200, sm_90",
        "m: pairs (bmm, 8 x 1x2x3)",
        "o: vast (needs about 999 GiB)",
        "torch active; deep_gemm not active (not installed)",
        "Versions: torch 2.11.0, triton 3.6",
        "none: the GPU has too little memory",
        "Over 3 sites",
        "Over 1 whole layers",
        "everywhere: NO (1 to torch, 1 to torch or bf16)",
        f"LOSS m/fc/grad_input: hp is 0.800 [0.798, 0.802] times as fast as torch ({TORCH})",
        "not in the means: m/top: no time for bf16, torch, torch or bf16, the choice",
        "command: loka bench gemm --out here",
    ):
        assert part in text, part
    (row,) = [line for line in text.splitlines() if line.startswith("m/fc") and "grad_weight" in line]
    assert row.split()[:5] == ["m/fc", "1000x500x100", "grad_weight", "100.0", "78.1"]
    assert f"78.1 {FAST}" in row
    assert "1.280 [1.277, 1.283]" in row


def test_ties_that_are_measurably_slower_are_counted():
    made = bench()
    slower = made.contests["m/fc/output"]
    object.__setattr__(slower, "versus", {**slower.versus, "torch": Estimate(0.995, 0.994, 0.996)})
    assert "the choice is measurably slower in 1, by less than the tie" in gemm_table(made)
