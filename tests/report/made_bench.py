"""A GEMM benchmark made by hand: two libraries, a shape that two models share, one that failed."""

from loka.core.device import Fingerprint
from loka.core.error import Estimate
from loka.core.records.gemm_bench import Contest, GemmBench, SuiteLayer, Use
from loka.core.timing import Timing

TORCH, FAST = "torch:rowwise_e4m3", "torch_fast:tensorwise_e4m3"


def around(value, relative):
    return Estimate(value, value / (1 + relative), value * (1 + relative))


def contest(choice, hp_us, speedups, noise=0.002):
    """One library, torch; `speedups` of what it runs, over hp."""
    alone = max(speedups, key=speedups.__getitem__, default="hp")
    known = {"hp": 1.0, **speedups}
    arms = {"hp": "hp", "torch": alone, "torch or hp": alone if known[alone] > 1 else "hp", "choice": choice}
    return Contest(
        arms=arms,
        timings={
            name: Timing(
                microseconds=around(hp_us / value, noise),
                speedup=around(value, noise if name != "hp" else 0.0),
                rounds=41,
            )
            for name, value in known.items()
        },
        versus={
            arm: around(known[choice] / known[runs], noise if runs != choice else 0.0)
            for arm, runs in arms.items()
            if arm != "choice"
        },
    )


def bench():
    layers = {
        "m/fc": SuiteLayer(
            rows=1000,
            in_features=500,
            out_features=100,
            uses=(Use(model="m", site="fc", count=2), Use(model="n", site="same", count=1)),
        ),
        "m/top": SuiteLayer(rows=1000, in_features=100, out_features=50, uses=(Use(model="m", site="top", count=1),)),
    }
    failed = Contest(arms={}, failures={"hp": "the GPU has too little memory"})
    contests = {
        "m/fc/output": contest(TORCH, 100.0, {TORCH: 2.0}),
        "m/fc/grad_input": contest("hp", 100.0, {TORCH: 1.25}),  # a choice that lost
        "m/fc/grad_weight": contest(FAST, 100.0, {FAST: 1.28}),
        "m/fc": contest(f"{TORCH} | hp | {FAST}", 300.0, {f"{TORCH} | hp | {FAST}": 1.5}),
        "m/top": failed,
    }
    return GemmBench(
        machine=Fingerprint(
            device="NVIDIA H200", target="sm_90", driver="1", cuda="13.0", torch="2.11.0", libraries={"triton": "3.6"}
        ),
        command="loka bench gemm --out here",
        settings={"tie": 0.01},
        libraries={"torch": "", "deep_gemm": "not installed"},
        layers=layers,
        not_covered={"m: pairs": "bmm, 8 x 1x2x3"},
        too_large={"o: vast": "needs about 999 GiB"},
        contests=contests,
        plan_digest="0",
        complete=True,
    )
