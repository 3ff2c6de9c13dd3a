"""The picture of a frontier: linear-layer time against predicted KL/H, with the knee marked."""

from pathlib import Path

from loka.planner.frontier import Frontier
from loka.report.plot import checked_path, matplotlib_module, save_figure

_LINE, _KNEE = "#0072B2", "#D55E00"


def plot_frontier(frontier: Frontier, path: Path | str) -> None:
    """Draws `frontier` into `path`, a .png, .svg or .pdf: a step a plan, its interval in NE as a bar.

    Raises:
        LokaError: another kind of file.
        MissingLibrary: matplotlib is not installed.
    """
    path = checked_path(path)
    figure_module = matplotlib_module("matplotlib.figure")
    with matplotlib_module("matplotlib").rc_context({"svg.hashsalt": "loka", "font.size": 9}):
        figure = figure_module.Figure(figsize=(7, 4.6), layout="constrained", facecolor="white")
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
        unit = "linear-layer time" if frontier.unit == "us" else "multiplications, halved in FP8 (not timed)"
        axis.set_ylabel(f"{unit}, % of hp")
        axis.grid(True, color="#e6e6e6", linewidth=0.7)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        figure.suptitle(f"{frontier.model} on {frontier.machine}", fontsize=10)
        save_figure(figure, path)
