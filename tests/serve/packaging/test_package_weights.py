import json
from types import SimpleNamespace

import pytest
import torch
from served import BOTH, EXACT, POW2, ROW, Cross, cross_plan, frozen, plan_for, tower
from torch import nn

from loka.core.exceptions import FileRefused, ServeRefused, WrongResults
from loka.core.storage.codec import decode, encode
from loka.core.storage.files import sha256_of_file
from loka.serve import freeze
from loka.serve.packaging import aot, weights
from loka.serve.packaging.checksum import checksum_of
from loka.serve.packaging.exported import Contents, contents_of, exported, tensors_of
from loka.serve.run import runner_of


def test_weights_are_for_a_package_of_their_own(monkeypatch, tmp_path):
    server, junk = frozen(tower(), dict.fromkeys(BOTH, ROW)), tmp_path / "junk.pt2"
    junk.write_text("no package")
    for path in (junk, tmp_path / "none.pt2"):
        with pytest.raises(FileRefused, match=r"(?s)no package that takes weights.*Way out"):
            server.package_weights(path, tmp_path / "w.pt")
    model = exported(server.current.module, server.plan, runner_of(server.card), server.device)
    read = set(tensors_of(model))
    contents = contents_of(model, (1, 64), read)
    # The first is what would be in code without `small`.
    assert [name.partition(".model.")[2] for name in contents.written] == ["logit.bias"]
    assert {"table.norm_type", "norm.eps", "logit.out_features", "training"} <= contents.kept.keys()
    monkeypatch.setattr(
        weights, "_contents_of", lambda path: decode(Contents, json.loads(json.dumps(encode(contents))))
    )

    def zeros(package, given, *_, **__):
        return {f"{size}/0": torch.zeros(int(size)) for size in {name.partition("/")[0] for name in given}}, []

    monkeypatch.setattr(aot, "answers_of", zeros)
    with pytest.raises(WrongResults, match=r"(?s)answers otherwise.*make the package anew"):
        server.package_weights(junk, tmp_path / "w.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["junk.pt2"]
    given = []
    monkeypatch.setattr(weights, "checked", lambda *all_of: (EXACT, given.append(all_of) or sorted(all_of[-1])))
    link, real = tmp_path / "w.pt", tmp_path / "real.pt"
    link.symlink_to(real)
    found = server.package_weights(junk, link)
    assert given[0][4] == (1, 64)
    assert torch.load(real, weights_only=True).keys() == tensors_of(model).keys()
    assert found.sha256 == sha256_of_file(real)
    for name in (link, real):
        assert checksum_of(name).read_text() == f"{found.sha256}  {name.name}\n"
    (tmp_path / "link.pt2").symlink_to(junk)
    with pytest.raises(ServeRefused, match="is the package"):
        server.package_weights(junk, tmp_path / "link.pt2")
    assert junk.read_text() == "no package"
    with monkeypatch.context() as patch:
        patch.setattr(server.current.module, "training", True)
        with pytest.raises(ServeRefused, match=r"(?s)holds numbers that differ.*training.*make the package anew"):
            server.package_weights(junk, tmp_path / "w.pt")
    server.refresh(tower(1).state_dict())
    with pytest.raises(ServeRefused, match=r"(?s)holds numbers that differ.*logit\.bias.*make the package anew"):
        server.package_weights(junk, tmp_path / "w.pt")
    with pytest.raises(ServeRefused, match="a package of another server"):
        frozen(tower(), dict.fromkeys(BOTH, POW2)).package_weights(junk, tmp_path / "w.pt")
    other = freeze(Cross().eval(), cross_plan(Cross(), ROW), calibration=[torch.randn(64, 24)])
    with pytest.raises(ServeRefused, match="a package of another server"):
        other.package_weights(junk, tmp_path / "w.pt")


class Small(nn.Module):
    """What Inductor would write into code: scalars, few entries, one value all over; and a weight of two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(24, 32), nn.Linear(32, 1)
        self.again = self.second
        nn.init.zeros_(self.first.bias)
        self.scale, self.ends = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(2))
        self.register_buffer("ones", torch.ones(32))
        self.turned = nn.Parameter(torch.randn(24, 24).t())

    def forward(self, x):
        x = torch.relu(self.first(x @ self.turned) * (self.ones * 2.0)).clamp(max=9.0)
        return (self.second(x) + self.again(x)) * self.scale * self.ends.sum() * torch.tensor(0.5)


def test_all_that_versions_differ_in_are_named_constants():
    """Of a program that reads them, none is a number in its code, and what it computes is what the model does."""
    torch.manual_seed(0)
    model = Small().eval()
    server = freeze(model, plan_for(model, {"first": ROW}), calibration=[torch.randn(64, 24)])
    module = exported(server.current.module, server.plan, runner_of(server.card), server.device)
    assert all(tensor.is_contiguous() for tensor in tensors_of(module).values())  # as their bytes are copied
    x = torch.randn(5, 24)
    program = torch.export.export(module, (x,), strict=False)
    assert contents_of(module, (5, 5), aot._read(program)).written == {}
    read = {name.partition(".")[2] for name in aot._read(program)}
    assert read >= {"sites.0.weight", "sites.0.scale", "model.first.bias", "model.ones"}
    assert len(read & {"model.second.weight", "model.again.weight"}) == 1
    assert {f"small.{place}" for place in range(3)} <= read
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), server.current.module(x))


class Noting(nn.Module):
    """What versions differ in beside the state dict: a hook derives a tensor, extra state holds the rest. No check
    reaches the bounds."""

    def __init__(self):
        super().__init__()
        self.first, self.bias, self.factor = nn.Linear(24, 32), nn.Parameter(torch.randn(32)), 1.0
        self.most, self.bounds, self.flag, self.calls = 1000, [-1000, 1000.0], True, 0
        self.options, self.edges = SimpleNamespace(most=1000.0), [torch.full((32,), 1000.0)]
        self._note()
        self.register_load_state_dict_post_hook(lambda module, _: module._note())

    def _note(self):
        self.twice = self.bias.detach() * 2

    def get_extra_state(self):
        return {name: getattr(self, name) for name in CHANGES}

    def set_extra_state(self, state):
        vars(self).update(state)

    def forward(self, x):
        self.rows, self.calls = x.shape[0], self.calls + 1
        y = self.first(x) * self.twice * self.factor
        y = y.clamp(*self.bounds).clamp(max=self.most).clamp(max=1000.0 if self.flag else 500.0)
        return torch.minimum(y.clamp(max=self.options.most), self.edges[0])


CHANGES = {
    "factor": 3.0,
    "most": 500,
    "bounds": [-1000, 500.0],
    "flag": False,
    "options": SimpleNamespace(most=500.0),
    "edges": [torch.full((32,), 500.0)],
}


def test_what_attributes_hold_is_in_the_code():
    """And what forward notes of its rows is not compared."""
    model = Noting().eval()
    server = freeze(model, plan_for(model, {"first": ROW}), calibration=[torch.randn(64, 24)])
    run = runner_of(server.card)
    was = exported(server.current.module, server.plan, run, server.device).kept
    assert {*CHANGES, "twice"} <= was.keys()
    assert not {"rows", "calls"} & was.keys()

    def differing(state):
        server.refresh(state)
        server(torch.randn(5, 24))
        now = exported(server.current.module, server.plan, run, server.device).kept
        assert now.keys() == was.keys()
        return {name for name in was if now[name] != was[name]}

    state = model.state_dict()
    assert not differing(state)
    for name, value in CHANGES.items():
        assert differing({**state, "_extra_state": {**state["_extra_state"], name: value}}) == {name}
    assert differing({**state, "bias": torch.randn(32)}) == {"twice"}


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.other = nn.Linear(24, 4), nn.Linear(24, 4)

    def forward(self, x):
        return self.first(x)


def test_a_server_whose_sites_no_row_reached_is_exported():
    model, x = Unused().eval(), torch.randn(64, 24)
    server = freeze(model, plan_for(model, {"other": ROW}), calibration=[x])
    assert server.card.unreached == ("other",)
    module = exported(server.current.module, server.plan, runner_of(server.card), server.device)
    assert torch.equal(module(x), server(x).output)
