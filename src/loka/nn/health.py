"""Finds NaN and infinity at FP8 sites, and counts how often sites ran. NaN is always in the result; this module names
the site.
"""

from torch import nn

from loka.core.exceptions import NonFinite
from loka.core.recipe import Gemm
from loka.nn.site import OPERAND_NAMES, health_of, sites_of


def check_finite(model: nn.Module) -> None:
    """Raises NonFinite if a NaN or infinity reached an FP8 site since `reset_health`.

    A saturating cast never hides one: the group's scale is non-finite, so the result is. The
    first site named is the first in the model's own order; where a `weight` is named the
    optimizer has already stepped on a bad gradient. Reading the flags synchronizes.
    """
    lines = []
    for site, counts in health_of(model).items():
        gemm = Gemm(site.rpartition("/")[2])
        names = [name for name, bad in zip(OPERAND_NAMES[gemm], (counts["bad_a"], counts["bad_b"]), strict=True) if bad]
        if names:
            lines.append(f"{site}: non-finite {' and '.join(names)}")
    if lines:
        raise NonFinite(
            f"NaN or infinity reached {len(lines)} FP8 sites; the first is {lines[0].partition(':')[0]}",
            why=lines,
            way_out="look at the data and the layers before the first site; "
            "loka.revert(model) runs the same step in high precision for comparison",
        )


def fp8_runs(model: nn.Module) -> dict[str, int]:
    """How often the GEMM of each FP8 site ran, replays of CUDA graphs included. Reading it synchronizes."""
    return {site: int(counts["runs"]) for site, counts in health_of(model).items()}


def reset_health(model: nn.Module) -> None:
    """Forgets counts and flags of every FP8 site."""
    for site in sites_of(model).values():
        site.health.data.zero_()  # see nn/site_ops.py
