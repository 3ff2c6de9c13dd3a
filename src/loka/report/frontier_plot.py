"""The picture of a frontier: linear-layer time against predicted KL/H, with the knee marked."""

from pathlib import Path

from loka.planner.frontier import Frontier
from loka.report.plot import checked_path, figure_in, open_axis

_LINE, _KNEE = "#0072B2", "#D55E00"


def plot_frontier(frontier: Frontier, path: Path | str) -> None:
    """Draws `frontier` into `path`, a .png, .svg or .pdf: a step a plan, its interval in NE as a bar.

    Raises:
        LokaError: another kind of file.
        MissingLibrary: matplotlib is not installed.
    """
    path = checked_path(path)
    with figure_in(path, width=7, height=4.6) as figure:
        axis = figure.subplots()
        spent = [point.spent for point in frontier.points]
        share = [100 * point.time / frontier.base for point in frontier.points]
        axis.step(spent, share, where="post", color=_LINE, linewidth=1.2, zorder=2)
        for point, percent in zip(frontier.points, share, strict=True):
            axis.plot([point.kl.low, point.kl.high], [percent] * 2, color=_LINE, alpha=0.35, zorder=1)
        axis.scatter(spent, share, s=16, color=_LINE, zorder=3)
        knee = frontier.knee
        at = (knee.spent, 100 * knee.time / frontier.base)
        axis.scatter(*at, s=70, facecolors="none", edgecolors=_KNEE, linewidths=1.6, zorder=4)
        axis.annotate(f"knee: budget {knee.budget:.1e}", at, textcoords="offset points", xytext=(8, 8), color=_KNEE)
        smallest = min((value for value in spent if value > 0), default=1e-6)
        axis.set_xscale("symlog", linthresh=smallest)
        axis.set_xlim(left=0)
        axis.set_xlabel("predicted KL/H (upper end; the bar is the 95 % interval)")
        unit = "linear-layer time" if frontier.unit == "us" else "FLOPs, halved in eight bits (not timed)"
        axis.set_ylabel(f"{unit}, % of hp")
        open_axis(axis)
        figure.suptitle(f"{frontier.model} on {frontier.machine}", fontsize=10)
