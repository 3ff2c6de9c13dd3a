"""The proof's tables from a summary: KL/H and NE by the labels side by side, verdicts, banks of pairs.

    python benchmarks/quality/proof_table.py benchmarks/quality/h200/proof.json
    python benchmarks/quality/proof_table.py summary.json --compact benchmarks/quality/h200/proof.json

All in percent of bf16's NE on held-out rows. First, of the trained model under an arm's forward alone: KL/H
as predicted and as measured, and NE by the labels. Then the pairs, trained under the arm from the start.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from loka.core.table import format_table

ARMS = ("plan", "tight", "mixed", "naive", "nudged")


def tables(summary: dict[str, Any]) -> str:
    forward, pairs = [], []
    for name, found in summary["models"].items():
        ne = next(iter(found["probe"]["changes"].values()))["ne"]
        scale = 100 / ne
        for arm, one in found["probe"]["changes"].items():
            low, high = (scale * one["predicted"][at] for at in (1, 2))
            joint = one["predicted_joint"]
            forward.append(
                (
                    name,
                    arm,
                    f"{one['sites']}",
                    f"{scale * one['predicted'][0]:.4f} [{low:.4f}, {high:.4f}]",
                    "-" if joint is None else f"{scale * joint:.4f}",
                    f"{scale * one['kl'][0]:.4f} +- {scale * one['kl'][1]:.4f}",
                    f"{scale * one['labelled'][0]:+.4f} +- {scale * one['labelled'][1]:.4f}",
                    f"{scale * one['first'][0]:+.4f} +- {scale * one['first'][1]:.4f}",
                    ", ".join(f"{path} {scale * value:.4f}" for path, value in one["largest"][:3]),
                )
            )
        verdicts = found.get("verdicts")
        if not verdicts:
            continue
        by_seed = list(verdicts["ne"].values())
        for arm in ARMS:
            one = verdicts["arms"].get(arm)
            if one is None:
                continue
            values = [pair[0] for pair in one["pairs"].values()]
            apart = [kl[0] for kl in one["kl_percent_of_h"]]
            value, low, high = one["ne_percent"]
            pairs.append(
                (
                    name,
                    f"{np.mean(by_seed):.4f}",
                    arm,
                    str(len(values)),
                    f"{value:+.4f} [{low:+.4f}, {high:+.4f}]",
                    f"{one['between']:.4f}",
                    f"{one['rows_error']:.4f}",
                    f"{np.mean(apart) / np.mean(by_seed):.4f} +- {deviation(apart) / np.mean(by_seed):.4f}",
                    one["verdict"],
                    one["outlook"],
                )
            )
    one = ("model", "arm", "sites", "KL/H predicted, sum", "with shifts", "KL/H measured", "NE by the labels")
    header = (*one, "first order", "largest predicted")
    other = ("model", "NE, bf16", "arm", "pairs", "NE by the labels", "SD of pairs", "SE of rows")
    last = ("KL/H between the two", "verdict at 0.02 %", "outlook")
    return f"{format_table(header, forward)}\n\n{format_table((*other, *last), pairs)}"


def deviation(values: list[float]) -> float:
    """Standard error of the mean."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def rounded(content: Any) -> Any:
    if isinstance(content, float):
        return float(f"{content:.5g}")
    if isinstance(content, dict):
        return {key: rounded(value) for key, value in content.items()}
    return [rounded(value) for value in content] if isinstance(content, list) else content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("summary", type=Path)
    parser.add_argument("--compact", type=Path, help="write it there with five digits and no blanks")
    given = parser.parse_args()
    summary = json.loads(given.summary.read_text())
    if given.compact:
        given.compact.write_text(json.dumps(rounded(summary), separators=(",", ":")))
    print(tables(summary))


if __name__ == "__main__":
    main()
