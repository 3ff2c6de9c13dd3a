"""The paired quality table: bf16 against a plan, on the same rows."""

from loka.core.table import format_table
from loka.train.metrics import Quality
from loka.validation.compare import Comparison
from loka.validation.paired import AcrossPairs, PairedDifference

HEADER = ("seed", "arm", "ne", "logloss", "auc", "calibration", "train ne", "rows/s")
"""Of a table with a row for each run, in text and on pages."""

NO_SEGMENTS = "There are no segments: the average may hide one."


def quality_table(comparison: Comparison) -> str:
    arms = [(pair.seed, arm) for pair in comparison.pairs for arm in (pair.bf16, pair.fp8)]
    if comparison.control is not None:
        arms.insert(1, (comparison.pairs[0].seed, comparison.control))
    rows = []
    for seed, arm in arms:
        rows.append((seed, arm.name, *quality_cells(arm.quality), f"{arm.train_ne:.5f}", f"{arm.rows_per_second:.0f}"))
    lines = [format_table(HEADER, rows), "", "paired difference, plan minus bf16, with 95 % interval:"]
    differences = [(f"seed {pair.seed}", *_columns(pair.difference), "") for pair in comparison.pairs]
    if comparison.noise is not None:
        differences.append(("noise: bf16, weights nudged by 1e-4", *_columns(comparison.noise), ""))
    across = comparison.across
    if across is not None:
        differences.append((f"mean of {across.pairs} pairs", *_columns(across), across.verdict))
    lines.append(format_table(("", "ne, relative", "auc", "calibration", "within 0.02 % NE?"), differences))
    lines.append(
        "A pair's interval covers the choice of held-out rows. Training amplifies any change, however small: "
        "the noise row shows by how much, and the mean over pairs covers it."
    )
    if across is None:
        lines.append("One pair cannot say whether NE is within 0.02 %: --pairs 4 or more can.")
    return "\n".join(lines)


def quality_cells(q: Quality) -> tuple[str, str, str, str]:
    """Those of `HEADER` from "ne" to "calibration"."""
    return f"{q.ne:.5f}", f"{q.logloss:.5f}", f"{q.auc:.5f}", f"{q.calibration:.4f}"


def _columns(difference: PairedDifference | AcrossPairs) -> tuple[str, str, str]:
    auc, calibration = difference.auc.shown("+.5f"), difference.calibration.shown("+.4f")
    return (difference.ne_percent.shown("+.4f") + " %", auc, calibration)
