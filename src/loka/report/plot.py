"""The picture of a GEMM benchmark: speed-up over bf16 by size, the choice by its library.

Drawn from the record alone, so that a machine without a GPU can draw it.
"""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loka.core.exceptions import LokaError, MissingLibrary
from loka.core.recipe import Gemm
from loka.core.records.gemm_bench import CHOICE, GemmBench, parted
from loka.core.records.report import HP, site_name
from loka.planner.baselines import library_of
from loka.report.gemm_summary import best_library, label, standings

_FORMATS = (".png", ".svg", ".pdf")
_LAYER = "whole layer, quantization shared"
_MIXED = "several libraries"

# Okabe and Ito's colours, which colour-blind readers tell apart, each with a marker of its own.
_STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#56B4E9", "v"), ("#E69F00", "P"))
_HP_STYLE = ("#555555", "x")
_MIXED_STYLE = ("#000000", "*")
_RIVAL_COLOURS = {"sites": "#a8a8a8", "layers": "#a09060"}


def plot_gemm(bench: GemmBench, path: Path | str) -> None:
    """Draws `bench` into `path`, a .png, .svg or .pdf.

    Four panels: each GEMM, and the layer with its three. A point is a shape, with the interval of
    its speed-up; a short bar is the library that does best alone over all shapes.

    Raises:
        LokaError: nothing was timed, or another kind of file.
        MissingLibrary: matplotlib is not installed.
    """
    path = checked_path(path)
    if not any(contest.timing(CHOICE) for contest in bench.contests.values()):
        raise LokaError("these results hold no times to draw", way_out="run `loka bench gemm` on a machine with a GPU")
    with figure_in(path, width=11, height=8.2) as figure:
        axes = figure.subplots(2, 2, sharex=True, sharey=True)
        styles = _styles(bench)
        seen: dict[str, Any] = {}
        rivals = {gemm: _rival(bench, gemm) for gemm in (*Gemm, None)}
        for axis, (gemm, rival) in zip(axes.flat, rivals.items(), strict=True):
            _panel(axis, bench, gemm, rival, styles, seen)
        _ticks(axes[0][0], bench, {CHOICE, *rivals.values()})
        for axis in axes[1]:
            axis.set_xlabel("GFLOP of one GEMM (2 M N K)")
        for row in axes:
            row[0].set_ylabel("speed-up over bf16")
        order = [name for name in seen if name not in styles]
        order = [*(name for name in styles if name in seen), *order]
        figure.legend(
            [seen[name] for name in order],
            ["bf16 kept" if name == HP else name for name in order],
            loc="outside lower center",
            ncols=min(len(order), 5),
            frameon=False,
        )
        figure.suptitle(_title(bench), fontsize=10)


def checked_path(path: Path | str) -> Path:
    """Raises LokaError for a kind of file that is not drawn."""
    path = Path(path)
    if path.suffix.lower() not in _FORMATS:
        raise LokaError(f"cannot draw into {path}", way_out=f"a file that ends in {', '.join(_FORMATS)}")
    return path


@contextmanager
def figure_in(path: Path, *, width: float, height: float) -> Iterator[Any]:
    """A figure of this size in inches, which is written to `path` when the block ends. The same figure makes the same
    file.
    """
    figure_module = matplotlib_module("matplotlib.figure")
    with matplotlib_module("matplotlib").rc_context({"svg.hashsalt": "loka", "font.size": 9}):
        figure = figure_module.Figure(figsize=(width, height), layout="constrained", facecolor="white")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def open_axis(axis: Any) -> None:
    """Puts a grid behind what is drawn, and removes the frame above and at the right."""
    axis.grid(True, color="#e6e6e6", linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def matplotlib_module(module: str) -> Any:
    """A module of matplotlib. Raises MissingLibrary where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingLibrary(
            "plots are drawn by matplotlib, which is not installed", way_out="pip install 'loka[plot]'"
        ) from error


def _styles(bench: GemmBench) -> dict[str, tuple[str, str]]:
    libraries = {name: _STYLES[index % len(_STYLES)] for index, name in enumerate(bench.active)}
    return {**libraries, _MIXED: _MIXED_STYLE, HP: _HP_STYLE}


def _panel(
    axis: Any,
    bench: GemmBench,
    gemm: Gemm | None,
    rival: str | None,
    styles: Mapping[str, tuple[str, str]],
    seen: dict[str, Any],
) -> None:
    axis.axhline(1.0, color="black", linewidth=1, zorder=1)
    drawn = []
    for path, layer in bench.layers.items():
        contest = bench.contests.get(site_name(path, gemm) if gemm else path)
        timing = contest.timing(CHOICE) if contest else None
        if contest is None or timing is None:
            continue
        alone = contest.timing(rival) if rival else None
        if rival and alone:
            where = "layers" if gemm is None else "sites"
            seen[f"best alone over {where}: {label(rival)}"] = axis.scatter(
                [layer.gflop],
                [alone.speedup.value],
                marker="_",
                s=90,
                linewidths=1.6,
                color=_RIVAL_COLOURS[where],
                zorder=2,
            )
        name = _library(contest.arms[CHOICE])
        colour, marker = styles.get(name, _MIXED_STYLE)
        ratio = timing.speedup
        axis.plot([layer.gflop] * 2, [ratio.low, ratio.high], color=colour, linewidth=1, alpha=0.6, zorder=3)
        filled = {} if marker == "x" else {"edgecolors": "white", "linewidths": 0.5}
        size = 70 if marker == "*" else 34
        seen[name] = axis.scatter([layer.gflop], [ratio.value], marker=marker, s=size, color=colour, zorder=4, **filled)
        drawn.append(contest)
    mean = standings(bench, drawn)[CHOICE].speedup
    average = f", geometric mean {mean.value:.2f}x" if mean else ""
    axis.set_title(f"{gemm.value if gemm else _LAYER}: {len(drawn)} shapes{average}", fontsize=9)
    axis.set_xscale("log")
    axis.set_yscale("log")
    open_axis(axis)


def _rival(bench: GemmBench, gemm: Gemm | None) -> str | None:
    contests = bench.whole_layers() if gemm is None else bench.sites()
    best = best_library(standings(bench, contests.values()))
    return best.arm if best else None


def _library(runs: str) -> str:
    names = {library_of(name) for name in parted(runs)} - {HP}
    if not names:
        return HP
    return names.pop() if len(names) == 1 else _MIXED


def _ticks(axis: Any, bench: GemmBench, arms: set[str | None]) -> None:
    values = [
        timing.speedup.value
        for contest in bench.contests.values()
        for arm in arms
        if arm and (timing := contest.timing(arm))
    ]
    low, high = min(*values, 1.0) * 0.95, max(*values, 1.0) * 1.05
    axis.set_ylim(low, high)
    steps = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.5, 3.0, 4.0)
    inside = [step for step in steps if low <= step <= high]
    ticker = matplotlib_module("matplotlib.ticker")
    axis.yaxis.set_major_locator(ticker.FixedLocator(inside))
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}x"))
    axis.yaxis.set_minor_locator(ticker.NullLocator())
    axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))


def _title(bench: GemmBench) -> str:
    return (
        f"{bench.machine.device}: what LoKA chose at each shape, against bf16 in the same rounds "
        f"(quantization included)\n{bench.machine.versions}"
    )
