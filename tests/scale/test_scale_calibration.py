"""Links measured by ranks: numbers that are got back, what is refused, and the file that is read."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from command_line import loka as run
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import network
from ranks import on_ranks

from loka.core.error import Estimate
from loka.core.exceptions import LokaError
from loka.core.records.network import Network, Own
from loka.scaling.cluster.calibration import SIZES, calibrate, measure, rounds
from loka.scaling.cluster.calibration.fit import Sample, checked, fitted_network, relative_line
from loka.scaling.cluster.collectives import OPS, Wire, check_ranks, wire_us

EXAMPLE = Path(__file__).parents[2] / "examples" / "h200-ib.json"
GROUPS = {
    "pair": [(1, 2)],
    "node": [(1, 2), (1, 4), (1, 8)],
    "nodes": [(1, 2), (1, 4), (4, 4)],
    "cards": [(4, 1)],
}


def true(per_node: int) -> Network:
    """Collectives that differ, as they do."""
    found = network(inside=(2, 300), between=(5, 40), per_node=per_node, launch=9)
    own = {op: Own(latency=1 + 0.1 * place, bandwidth=1 / (1 + 0.2 * place)) for place, op in enumerate(OPS)}
    return replace(found, inside=replace(found.inside, own=own), between=replace(found.between, own=own))


def samples(net: Network, groups: Any, sizes: Any = SIZES, noise: Any = lambda: 1.0) -> list[Sample]:
    found = []
    for nodes, inner in groups:
        for op in OPS:
            for size in sizes:
                us = wire_us(Wire(op, size), nodes * inner, net) * noise()
                found.append(
                    Sample(op=op, size=size, nodes=nodes, inner=inner, us=Estimate(us, us * 0.99, us * 1.01))
                )
    return found


@pytest.mark.parametrize("name", GROUPS)
def test_times_of_a_known_network_are_told_again(name: str) -> None:
    """From every second size, at the others; and where groups of several sizes tell hops from launches, at
    numbers of GPUs that were not measured."""
    groups = GROUPS[name]
    inner = max(inner for _, inner in groups)
    net = true(inner)
    blank = network(per_node=inner)
    found = fitted_network(blank, samples(net, groups, SIZES[::2]), ranks_in_node=inner)
    for row in checked(found, samples(net, groups, SIZES[::2]), samples(net, groups, SIZES[1::2])):
        assert row.error < (0.02 if name == "nodes" else 1e-3), row
    elsewhere = {"node": 6, "nodes": 64}.get(name)
    if elsewhere:
        for op in OPS:
            told, is_so = (wire_us(Wire(op, 1 << 24), elsewhere, one) for one in (found, net))
            assert told == pytest.approx(is_so, rel=0.1)
    if name in ("pair", "cards"):
        link = found.inside if name == "pair" else found.between
        assert link.alpha_us.origin == "assumed"
        assert "NCCL" in link.alpha_us.comment
        assert link.alpha_us.high > 2 * link.alpha_us.value
        assert link.bandwidth_gbps.origin == "measured"


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 20), name=st.sampled_from(sorted(GROUPS)))
def test_every_fitted_time_lies_between_the_ends(seed: int, name: str) -> None:
    drawn = random.Random(seed)
    groups = GROUPS[name]
    inner = max(inner for _, inner in groups)
    given_ = samples(true(inner), groups, SIZES[::2], lambda: drawn.lognormvariate(0, 0.3))
    found = fitted_network(network(per_node=inner), given_, ranks_in_node=inner)
    fast: Any = {n: "high" if "bandwidth" in n else "low" for n in found.quantities}
    slow: Any = {n: "low" if "bandwidth" in n else "high" for n in found.quantities}
    for one in given_:
        wire = Wire(one.op, one.size)
        assert wire_us(wire, one.ranks, found, fast) <= one.us.low * (1 + 1e-9)
        assert wire_us(wire, one.ranks, found, slow) >= one.us.high * (1 - 1e-9)


def test_the_line_has_the_least_relative_error() -> None:
    assert relative_line([1, 10, 100], [5 + 2, 5 + 20, 5 + 200]) == pytest.approx((5, 2))
    x, times = [1.0, 10.0, 100.0, 1000.0], [9.0, 20.0, 330.0, 1500.0]

    def error(a: float, b: float) -> float:
        return sum(((a + b * v) / t - 1) ** 2 for v, t in zip(x, times, strict=True))

    a, b = relative_line(x, times)
    assert error(a, b) < min(error(a * f, b * g) for f, g in ((1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)))
    fixed, _ = relative_line([1, 10, 100], [0.9, 10, 101])  # which a line through them meets below 0
    assert fixed == 0


def test_times_that_do_not_grow_tell_no_bandwidth() -> None:
    flat = [replace(one, us=Estimate(9 - one.size / SIZES[-1], 1, 9)) for one in samples(true(2), [(1, 2)])]
    with pytest.raises(LokaError, match="takes no longer for more bytes"):
        fitted_network(network(per_node=2), flat, ranks_in_node=2)


def test_a_late_host_costs_that_timing_on_every_rank() -> None:
    nan, points = float("nan"), [("all_reduce", 1 << 20)]
    many = [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, nan]]
    found, behind = rounds._over_ranks(points, [many, [[2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 1.0]]])
    assert found[points[0]].value == 7  # of the slower rank, of the six rounds that both have
    assert behind == pytest.approx([1, 2])
    with pytest.raises(LokaError, match="waited for its host in 2 of 7"):
        rounds._over_ranks(points, [many, [[nan, *many[0][1:]]]])


SMALL = tuple(1 << step for step in range(12, 21, 2))


@dataclass(frozen=True)
class Job:
    """The command on two ranks, and what else they are asked for."""

    def __call__(self, rank: int, folder: Path) -> dict[str, Any]:
        out = folder / "net.json"
        refused = {}
        with (
            mock.patch.object(measure, "SIZES", SMALL),
            mock.patch.object(rounds, "_BACK_TO_BACK", 1.0),  # one call at a time
            mock.patch("loka.cli.commands.calibrate.calibrate", functools.partial(calibrate, seconds=0.1)),
        ):
            text = run("scale", "calibrate", "--out", out, "--max-mb", 1, "--device", "cpu", cwd=folder)
            found = calibrate("cpu", base=Network.load(EXAMPLE), seconds=0.1)
            with mock.patch.dict("os.environ", {"LOCAL_WORLD_SIZE": "1"}):
                cards = calibrate("cpu", seconds=0.1)
        asked = {
            "apart": {"most_bytes": 1 << (20 + rank)},
            "small": {"most_bytes": 1 << 19},
            "base": {"most_bytes": 1 << 20, "base": network(per_node=1)},
        }
        for name, options in asked.items():
            refused[name] = self.refused(**options)  # type: ignore[arg-type]
        with mock.patch.object(measure, "Buffers", _no_room if rank else rounds.Buffers):
            refused["memory"] = self.refused(most_bytes=1 << 20)
        return {"text": text, "based": found.gpus_per_node, "cards": cards.gpus_per_node, **refused}

    def refused(self, **options: Any) -> str:
        with pytest.raises(LokaError) as raised:
            calibrate("cpu", seconds=0.1, **options)
        return str(raised.value)


def _no_room(*sides: Any, **named: Any) -> None:
    raise RuntimeError("no room for it")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, on_ranks(Job(), 2, folder)


def test_two_ranks_write_what_a_forecast_reads(told: Any, tmp_path: Path) -> None:
    folder, (first, second) = told
    found = Network.load(folder / "net.json")
    how = found.measured
    assert how is not None
    assert {(one.op, one.ranks) for one in how.collectives} == {(op, 2) for op in OPS}
    assert (how.backend, how.ranks, how.nodes, how.machine.device) == ("gloo", 2, 1, "cpu")
    assert (how.sizes, how.held_out) == (SMALL[::2], SMALL[1::2])
    assert found.inside.bandwidth_gbps.origin == found.memory_gbps.origin == "measured"
    assert f"{100 * how.worst.error:.1f} %" in first["text"]
    assert second["text"] == ""
    (tmp_path / "my_calibrated.py").write_text(
        "import torch\ndef build(): return torch.nn.Linear(2048, 2048), torch.randn(4, 2048)\n"
    )
    text = run("scale", "my_calibrated:build", "--network", folder / "net.json", cwd=tmp_path)
    assert "links were measured on cpu, and GEMMs on NVIDIA H200" in text
    assert "measured: middle of what collectives reached; 2 ranks of a node" in text
    refused = run(
        "scale", "my_calibrated:build", "--network", folder / "net.json", "--gpus", 8, cwd=tmp_path, fails=2
    )
    assert "nothing of links between nodes" in refused
    with pytest.raises(LokaError, match="--base"):
        check_ranks(8, found)


def test_a_base_says_what_is_not_measured(told: Any) -> None:
    assert [one["based"] for one in told[1]] == [8, 8]
    assert [one["cards"] for one in told[1]] == [1, 1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("apart", "rank 1: --max-mb in bytes: 1048576 here, 2097152 there"),
        ("small", "--max-mb 1 or more"),
        ("base", "nodes of 1 GPUs, and 1 of 2 ranks were measured"),
        ("memory", "rank 1: RuntimeError: no room for it"),
    ],
)
def test_where_one_rank_cannot_none_goes_on(told: Any, name: str, text: str) -> None:
    for rank in told[1]:
        assert text in rank[name]


def test_one_rank_is_refused_with_the_command(tmp_path: Path) -> None:
    text = run("scale", "calibrate", "--out", "net.json", "--device", "cpu", cwd=tmp_path, fails=2)
    assert "torchrun --nproc-per-node 2 -m loka scale calibrate" in text
    assert not (tmp_path / "net.json").exists()
    assert "--out" in run("scale", "calibrate", cwd=tmp_path, fails=2)


def test_a_share_of_nothing_is_refused(tmp_path: Path) -> None:
    content = json.loads(EXAMPLE.read_text())
    content["inside"]["own"] = {"all_reduce": {"latency": 0, "bandwidth": 1}}
    (tmp_path / "net.json").write_text(json.dumps(content))
    with pytest.raises(LokaError, match=r"inside.own.all_reduce: shares are above 0"):
        Network.load(tmp_path / "net.json")
