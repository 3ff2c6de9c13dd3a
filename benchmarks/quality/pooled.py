"""All pairs of several validations together: mean differences of NE in percent, by arm and between arms.

    python benchmarks/quality/pooled.py benchmarks/quality/{dlrm,dcnv2,wukong,dhen,interformer}.json

Every pair counts alike. Intervals are Student's t over pairs: of other seeds on these held-out rows.
"""

from __future__ import annotations

import sys
from pathlib import Path

from loka.core.error import estimate_mean
from loka.validation.record import Validation


def main() -> None:
    differences: dict[str, list[float]] = {"plan": [], "naive": []}
    for path in map(Path, sys.argv[1:]):
        arms = {arm.name: arm for arm in Validation.load(path).arms}
        for name, found in differences.items():
            found += [
                arms[name].differences[seed].ne_percent.value for seed in sorted(arms[name].differences)
            ]
    differences["naive minus plan"] = [
        naive - plan for plan, naive in zip(differences["plan"], differences["naive"], strict=True)
    ]
    for name, found in differences.items():
        mean = estimate_mean(found)
        print(f"{name}: {mean.value:+.3f} % [{mean.low:+.3f}, {mean.high:+.3f}] over {len(found)} pairs")


if __name__ == "__main__":
    main()
