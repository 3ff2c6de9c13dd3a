import json

import pytest
from networks import EXAMPLE

from loka.core.exceptions import FileRefused
from loka.core.records.network import Network


def test_the_example_network_labels_every_number():
    found = Network.load(EXAMPLE)
    for name, quantity in found.quantities.items():
        assert quantity.origin == "assumed", name
        assert len(quantity.comment) > 20, name


_BROKEN = {
    "gpus_per_node is 0": lambda net: net.update(gpus_per_node=0),
    "inside.alpha_us: 0 < low <= value <= high": lambda net: net["inside"]["alpha_us"].update(low=5),
    "between.bandwidth_gbps: 0 < low": lambda net: net["between"]["bandwidth_gbps"].update(low=-1),
    "between is missing": lambda net: net.pop("between"),
    "inside.bandwidth_gbps.value has to be a number": lambda net: net["inside"]["bandwidth_gbps"].update(value="fast"),
    "inside.own.all_reduce: shares are above 0": lambda net: net["inside"].update(
        own={"all_reduce": {"latency": 0, "bandwidth": 1}}
    ),
    "launch_us.origin has to be one of": lambda net: net["launch_us"].update(origin="known"),
    "launch_us: comment is empty": lambda net: net["launch_us"].update(comment=" "),
    "switches, of which nothing is known": lambda net: net.update(switches=3),
    "inside: own is of allreduce": lambda net: net["inside"].update(own={"allreduce": {"latency": 1, "bandwidth": 2}}),
    "high is at most 1": lambda net: net["elementwise_share"].update(high=1.5),
}


@pytest.mark.parametrize("told", _BROKEN)
def test_broken_networks(told, tmp_path):
    content = json.loads(EXAMPLE.read_text())
    _BROKEN[told](content)
    (tmp_path / "net.json").write_text(json.dumps(content))
    with pytest.raises(FileRefused, match="as a network") as raised:
        Network.load(tmp_path / "net.json")
    assert told in str(raised.value)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"name": 1e999}'])
def test_files_that_are_no_networks(text, tmp_path):
    (tmp_path / "net.json").write_text(text)
    with pytest.raises(FileRefused, match="as a network"):
        Network.load(tmp_path / "net.json")
    with pytest.raises(FileRefused, match="no such file"):
        Network.load(tmp_path / "none.json")
    with pytest.raises(FileRefused, match="as a network"):
        Network.load(tmp_path)
