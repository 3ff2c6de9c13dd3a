import pytest

from loka.core.error import Estimate
from loka.core.exceptions import LokaError
from loka.planner.frontier import Frontier, Point
from loka.report.frontier_plot import plot_frontier


def made():
    def point(budget, time, knee=False):
        effect = Estimate(budget / 2, budget / 4, budget)
        fp8 = {"a/output": "torch:rowwise_e4m3"}
        return Point(budget=budget, kl=effect, spent=budget, time=time, fp8=fp8, knee=knee)

    points = (point(0.0, 100.0), point(1e-6, 60.0, knee=True), point(1e-4, 50.0))
    return Frontier(model="Net", machine="NVIDIA H200", base=100.0, unit="us", points=points)


def test_the_knee_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plot_frontier(made(), tmp_path / "new" / "frontier.svg")
    text = (tmp_path / "new" / "frontier.svg").read_text()
    for told in ("knee: budget 1.0e-06", "Net on NVIDIA H200", "linear-layer time, % of hp"):
        assert f"<!-- {told}" in text, told
    plot_frontier(made(), tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == text, "the same results make the same file"


def test_other_files_are_refused(tmp_path):
    with pytest.raises(LokaError, match=r"\.png, \.svg, \.pdf"):
        plot_frontier(made(), tmp_path / "frontier.doc")
