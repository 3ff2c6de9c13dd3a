import copy
import threading
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from served import BOTH, ROW, TENSOR, Cross, converted, cross_plan, frozen, plan_for, rows, tower
from torch import nn

from loka.core.exceptions import ServeRefused
from loka.serve import freeze, load


def served(shadow=0.0, candidate=ROW):
    return frozen(tower(), dict.fromkeys(BOTH, candidate), buckets=(8, 64), shadow=shadow)


def test_refreshed_equals_frozen_from_the_new_weights():
    server = served()
    model = tower(1)
    request = rows(64)
    with torch.no_grad():
        expected = converted(model, plan_for(model, BOTH))(*request)
    before = server(request)
    state = model.state_dict()
    assert server.refresh(state) == server.version == 2
    with torch.no_grad():
        for value in state.values():
            value.zero_()  # as training goes on: the server has copies
    after = server(request)
    assert (before.version, after.version) == (1, 2)
    assert torch.equal(after.output, expected)
    assert server.rollback() == 1
    again = server(request)
    assert again.version == 1
    assert torch.equal(again.output, before.output)
    with pytest.raises(ServeRefused, match="no version before 1"):
        server.rollback()
    assert server.refresh(tower(2).state_dict()) == 3  # a number names one version for ever


def test_raw_parameters_are_refreshed():
    torch.manual_seed(0)
    model, other = Cross().eval(), Cross().eval()
    plan = cross_plan(model, ROW)
    x = torch.randn(64, 24)
    server = freeze(model, plan, calibration=[x])
    server.refresh(other.state_dict())
    with torch.no_grad():
        expected = converted(other, plan)(x)
    assert all(torch.equal(server(x).output[name], expected[name]) for name in expected)


class Renamed(nn.Linear):
    """State dicts of its first version named the bias otherwise, as modules of torch.ao have it."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *others):
        version = local_metadata.get("version", 1)
        if version == 0:
            state_dict[f"{prefix}bias"] = state_dict[f"{prefix}bias"] * 2
        elif version == 1:
            state_dict[f"{prefix}bias"] = state_dict.pop(f"{prefix}offset")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


def test_state_dicts_keep_the_version_of_their_form(tmp_path):
    model, other = (nn.Sequential(nn.Linear(24, 32), Renamed(32, 16)).eval() for _ in range(2))
    plan = plan_for(model, {"0": ROW})
    x = torch.randn(64, 24)
    server = freeze(model, plan, calibration=[x])
    with torch.no_grad():
        expected = converted(other, plan)(x)
    old = other.state_dict()
    old["1.offset"] = old.pop("1.bias")
    old._metadata["1"]["version"] = 1
    for state in (dict(other.state_dict()), other.state_dict()):  # the first says nothing of versions
        server.refresh(state)
        assert torch.equal(server(x).output, expected)
    with pytest.raises(ServeRefused, match=r"1\.offset is not in the model"):
        server.refresh(old)
    scaled = other.state_dict()
    scaled["1.bias"] = scaled["1.bias"] / 2
    scaled._metadata["1"]["version"] = 0
    server.refresh(scaled)
    assert torch.equal(server(x).output, expected)
    server.save(tmp_path / "server")
    assert torch.equal(load(tmp_path / "server", model)(x).output, server(x).output)


@pytest.mark.parametrize("candidate", [ROW, TENSOR])
def test_no_answer_mixes_versions_and_none_is_lost(candidate):
    """Requests of 150 rows are split over three runs of the model; refreshes go on between those."""
    server = served(candidate=candidate)
    states = [tower(seed).state_dict() for seed in range(3)]
    request = rows(150)
    expected = {1: server(request).output}
    for state in states[1:]:
        version = server.refresh(state)
        expected[version] = server(request).output
    assert not torch.equal(expected[1], expected[2])
    answers = []
    stop = threading.Event()

    def ask():
        while not stop.is_set():
            answers.append(server(request))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(40):
        expected[server.refresh(states[turn % 3])] = expected[turn % 3 + 1]
        if turn % 5 == 0:
            server.rollback()
    stop.set()
    for thread in threads:
        thread.join()
    assert len({answer.version for answer in answers}) > 3
    assert all(torch.equal(answer.output, expected[answer.version]) for answer in answers)


def _changed(name, value):
    state = copy.deepcopy(tower(1).state_dict())
    if value is None:
        del state[name]
    else:
        state[name] = value
    return state


def _freed():
    """As FSDP leaves what it sharded: to read it ends the process."""
    weight = torch.zeros(37, 24)
    weight.untyped_storage().resize_(0)
    return weight


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({}, "table.weight is missing"),
        (_changed("first.bias", None), "first.bias is missing"),
        (_changed("extra", torch.zeros(1)), "extra is not in the model"),
        (_changed("first.weight", torch.zeros(37, 25)), r"first.weight is \[37, 25\], the model has \[37, 24\]"),
        (_changed("first.weight", torch.zeros(37, 24).char()), "first.weight is .* of integers, the model"),
        (_changed("first.weight", torch.zeros(37, 24).numpy()), "first.weight is a ndarray, the model"),
        (_changed("first.weight", torch.zeros(37, 24, device="meta")), "first.weight is torch.strided on meta, the"),
        (_changed("first.weight", nn.UninitializedParameter()), "first.weight is a UninitializedParameter, the"),
        (_changed("first.weight", _freed()), "first.weight is freed, the model"),
        (_changed("first.weight", torch.zeros(37, 24).to_sparse()), "first.weight is torch.sparse_coo on cpu, the"),
        (_changed("logit.bias", torch.full((1,), torch.nan)), "logit.bias holds NaN or infinity"),
        (_changed("first.weight", torch.full((37, 24), torch.inf)), "first.weight holds NaN or infinity"),
        (_changed("logit.bias", torch.tensor([1e300], dtype=torch.float64)), "logit.bias holds .* infinity in float32"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_what_runs_goes_on(state, told):
    server = served()
    before = server(rows(8)).output
    with pytest.raises(ServeRefused, match=told):
        server.refresh(state)
    answer = server(rows(8))
    assert answer.version == 1
    assert torch.equal(answer.output, before)
    assert server.refresh(tower(1).state_dict()) == 2  # no number is used up


def test_part_of_the_weights_may_be_kept():
    server = served()
    fresh = tower(1)
    dense = {key: value for key, value in fresh.state_dict().items() if not key.startswith("table.")}
    with pytest.raises(ServeRefused, match=r"table\.weight is missing"):
        server.refresh(dense)
    server.refresh(dense, keep=["table.*"])
    fresh.table.load_state_dict(tower().table.state_dict())
    with torch.no_grad():
        expected = converted(fresh, plan_for(fresh, BOTH))(*rows(64))
    assert torch.equal(server(rows(64)).output, expected)
    server.refresh(tower(1).state_dict(), keep="table.*")
    assert torch.equal(server.current.module.table.weight, tower(1).table.weight), "none of it is missing"
    with pytest.raises(ServeRefused, match=r"(?s)'first.\*' cannot be kept.*in FP8 alone"):
        server.refresh({}, keep=["first.*"])
    with pytest.raises(ServeRefused, match="no key matches"):
        server.refresh(dense, keep=["tables.*"])


def test_static_scales_stay_those_of_the_calibration_rows():
    server = served(candidate=TENSOR)
    scales = {name: scale.clone() for name, scale in server._scales.items()}
    server.refresh(tower(1).state_dict())
    assert set(scales) == set(BOTH)
    assert all(torch.equal(server._scales[name], scale) for name, scale in scales.items())


class Pair(NamedTuple):
    one: torch.Tensor
    two: torch.Tensor


class Moded(nn.Module):
    """Buffers in and out of the state dict, what is no tensor in it, and weights that two modules share."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(24)
        self.register_buffer("offset", torch.randn(24), persistent=False)

    def forward(self, x):
        y = self.second(torch.relu(self.norm(self.first(x)))) + self.offset
        return Pair(y, y.sum(1))

    def get_extra_state(self):
        return {"made": "by hand"}

    def set_extra_state(self, state):
        assert state == {"made": "by hand"}


class Scaled(nn.Module):
    """Its extra state is its own list, as torch has it by reference."""

    def __init__(self):
        super().__init__()
        self.first, self.scales = nn.Linear(24, 24), [1.0, torch.ones(24)]

    def get_extra_state(self):
        return self.scales

    def set_extra_state(self, state):
        self.scales = state

    def forward(self, x):
        return self.first(x) * self.scales[0] * self.scales[1]


def test_extra_state_is_the_servers_own():
    """Training goes on with the objects of the state dict that a refresh took."""
    torch.manual_seed(0)
    model, x = Scaled().eval(), torch.randn(64, 24)
    server = freeze(model, plan_for(model, {"first": ROW}), calibration=[x])
    server.refresh(model.state_dict())
    expected = server(x).output
    model.scales[0] = 2.0
    model.scales[1].mul_(2.0)
    assert torch.equal(server(x).output, expected)


class Causal(nn.Module):
    """A mask in the state dict, with infinity in some places."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

    def forward(self, x):
        y = self.first(x).unflatten(1, (4, 6))
        return ((y @ y.transpose(1, 2) + self.mask).softmax(dim=2) @ y).sum(dim=(1, 2))


def test_masks_of_infinity_are_loaded_and_refreshed(tmp_path):
    """In the places where they were: others are of a broken checkpoint."""
    torch.manual_seed(0)
    model, other, x = Causal().eval(), Causal().eval(), torch.randn(64, 24)
    plan = plan_for(model, {"first": ROW})
    server = freeze(model, plan, calibration=[x], shadow=1.0)
    server.save(tmp_path)
    loaded = load(tmp_path, other, shadow=1.0)
    assert torch.equal(loaded(x).output, server(x).output)
    loaded.refresh(other.state_dict())
    assert torch.equal(loaded(x).output, freeze(other, plan, calibration=[x])(x).output)
    for wrong in (
        torch.full((4, 4), -torch.inf).tril(-1),
        torch.full((4, 4), torch.inf).triu(1),
        other.mask * torch.nan,
    ):
        with pytest.raises(ServeRefused, match="mask holds NaN or infinity"):
            loaded.refresh(other.state_dict() | {"mask": wrong})


def test_a_row_of_nan_that_nobody_reads_is_loaded_and_refreshed(tmp_path):
    """It was frozen and saved, and no process could load it."""
    model, (dense, ids) = tower(), rows(40)
    with torch.no_grad():
        model.table.weight[49] = torch.nan
    ids = ids.clamp_max(48)
    server = frozen(model, BOTH, calibration=[(dense, ids)], shadow=1.0)
    server.save(tmp_path)
    loaded = load(tmp_path, tower(1), shadow=1.0)
    assert loaded.refresh(model.state_dict()) == 2
    assert torch.equal(loaded((dense, ids)).output, server((dense, ids)).output)
    with torch.no_grad():
        model.table.weight[48] = torch.nan
    with pytest.raises(ServeRefused, match=r"table\.weight holds NaN or infinity"):
        loaded.refresh(model.state_dict())


def test_buffers_and_shared_weights(tmp_path):
    torch.manual_seed(0)
    model, other = Moded().eval(), Moded().eval()
    with torch.no_grad():
        other.norm.running_mean.uniform_(-1, 1)
    plan = plan_for(model, BOTH)
    x = torch.randn(64, 24)
    server = freeze(model, plan, calibration=[x])
    assert server.card.dropped == ()
    with torch.no_grad():
        assert torch.equal(server(x).output.one, converted(model, plan)(x).one)
        server.refresh(other.state_dict())
        other.offset.copy_(model.offset)  # in no state dict: it stays
        found, expected = server(x).output, converted(other, plan)(x)
    assert all(map(torch.equal, found, expected))
    with pytest.raises(ServeRefused, match="_extra_state is missing"):
        server.refresh(dict(other.named_parameters()) | dict(other.named_buffers()))
    untied = other.state_dict() | {"second.weight": 2 * other.second.weight}
    with pytest.raises(ServeRefused, match=r"first.weight and second.weight are one weight in the model, and differ"):
        server.refresh(untied)
    server.save(tmp_path)
    assert torch.equal(load(tmp_path, model)(x).output.two, expected.two)


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x):
        y, chosen = torch.zeros_like(x), x[:, :8].argmax(1)
        for place in chosen.unique():
            y[chosen == place] = self.experts[place](x[chosen == place])
        return y


def test_experts_that_run_for_their_rows_alone_are_found_by_many():
    """Four rows reach four of eight at most."""
    model, other, x = Routed(), Routed().requires_grad_(False), torch.randn(64, 16)
    plan = plan_for(model, {f"experts.{place}": ROW for place in range(8)})
    server = freeze(model, plan, calibration=[x], buckets=(64,))
    server.refresh(other.state_dict())
    assert torch.equal(server(x).output, converted(other, plan)(x))


def test_the_shadow_check_reports_the_difference():
    server = served(shadow=0.25)
    model = tower()
    apart = []
    for turn in range(16):
        request = rows(64, seed=turn)
        answer = server(request).output
        if turn % 4 == 0:
            with torch.no_grad():
                apart.append((answer - model(*request)).abs())
    found = server.shadow()
    assert (found.requests, found.rows, found.nonfinite) == (4, 256, 0)
    assert found.max_abs == pytest.approx(float(torch.stack(apart).max()), rel=1e-4)
    assert found.mean_abs == pytest.approx(float(torch.stack(apart).mean()), rel=1e-4)
    assert 0 < found.mean_abs < found.max_abs
    assert "4 requests" in str(found)
    server.refresh(tower(1).state_dict())
    assert server.shadow().requests == 0  # of the weights that run now
    for _ in range(4):
        server(rows(8))
    assert server.shadow().requests == 1
    assert server.shadow().max_abs > 0, "of weights that are no FP8 sites'"
    with pytest.raises(ServeRefused, match="no share"):
        served(shadow=1.5)


def test_a_shadow_that_fails_loses_no_answer(caplog):
    server, x = served(shadow=1.0), rows(4)
    expected = server(x).output
    with mock.patch.object(server.current.precise, "forward", side_effect=torch.OutOfMemoryError("no memory left")):
        assert all(torch.equal(server(x).output, expected) for _ in range(2))
    told = [record.message for record in caplog.records if "no memory left" in record.message]
    assert len(told) == 1
    found = server.shadow()
    assert (found.requests, found.failed) == (1, 2)
    assert str(found).endswith("; 2 more failed in high precision")


def test_the_share_of_shadowed_requests_is_the_one_asked_for():
    """1 / share was rounded: 0.7 shadowed all, and 0.4 half of them."""
    server = served(shadow=0.7)
    for _ in range(20):
        server(rows(1))
    assert server.shadow().requests == 14


def test_without_a_shadow_no_weight_in_high_precision_stays():
    assert served()._current.precise is None
    assert str(served().shadow()) == "no request was shadowed"
