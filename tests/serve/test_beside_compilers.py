"""Other threads of the process compile: what torch says of that is of all threads."""

import pytest
import torch
from served import ROW, calibration, plan_for, rows, tower
from torch import nn

import loka
from loka.core.exceptions import NotConverted
from loka.serve import freeze
from loka.serve.watch.monitor import EVERY


@pytest.fixture
def compiling(monkeypatch):
    """As torch.export and torch.compile have it while they run."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.compiler.is_compiling()


def test_each_request_goes_by_the_plan_of_its_rows(request):
    plans = {16: plan_for(tower(), {}), 64: plan_for(tower(), {"first": ROW, "second": ROW})}
    server = freeze(tower(), plans, calibration=calibration(), buckets=(16, 64))
    few, many = (server(rows(count)).output for count in (5, 64))
    request.getfixturevalue("compiling")
    assert torch.equal(server(rows(5)).output, few)
    assert torch.equal(server(rows(64)).output, many)


def test_the_alarm_sees_int8_sites(compiling):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).eval()
    plan = plan_for(model, {"0": "emulated:int8_row"})
    server = freeze(model, plan, calibration=[torch.randn(64, 64)])
    for _ in range(2 * EVERY):
        server(torch.full((4, 64), torch.nan))
    assert [alarm.kind for alarm in server.alarms()] == ["nonfinite"]


def test_a_penalty_on_gradients_is_refused(compiling):
    model = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))
    loka.convert(model, plan_for(model, {"0": (ROW, ROW, ROW)}))
    x = torch.randn(8, 32, requires_grad=True)
    with pytest.raises(NotConverted, match="no second derivative"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_a_probe_watches(compiling):
    model = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        model(torch.randn(8, 32)).sum().backward()
    assert set(probe.stats().layers) == {"0", "2"}
