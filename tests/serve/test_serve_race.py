import pytest
import torch
from served import plan_for
from test_serve_graphs import BUCKETS, PLAN, backend, compiled_answer, frozen, inputs, wide

from loka.core.exceptions import ServeRefused
from loka.serve import freeze, graphs

__all__ = ["backend"]  # a fixture


def test_each_bucket_takes_what_is_fastest(backend, monkeypatch):
    """Its own plan within the noise; answers are those of the compiled model with these sites in FP8."""
    model = wide()
    few, many = (plan_for(model, {name: PLAN[name] for name in names}) for names in (["first"], PLAN))
    # Replays in order: all in high precision, the first plan, the second; 2 rows and 16 of each.
    taken = iter([6.0, 30.0, 4.98, 25.0, 9.0, 20.1])

    def microseconds(recording, device):
        recording.replay()
        return next(taken, 1.0)

    monkeypatch.setattr(graphs, "_microseconds", microseconds)
    rows = [inputs(40, seed) for seed in range(3)]
    server = freeze(model, {2: few, 16: many}, calibration=rows, autocast=torch.bfloat16, buckets=BUCKETS, race=True)
    assert [set(names) for names in server.card.in_hp] == [{"second", "odd"}, set()]
    assert torch.equal(server(inputs(16)).output, compiled_answer(model, inputs(16)))
    taken = iter([5.0, 20.1, 4.98, 20.0, 9.0, 20.0])  # ties
    server = freeze(model, {2: few, 16: many}, calibration=rows, autocast=torch.bfloat16, buckets=BUCKETS, race=True)
    assert [set(names) for names in server.card.in_hp] == [set(PLAN)] * 2
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(server(inputs(16)).output, model(inputs(16)), rtol=1e-2, atol=1e-2)
    assert all("first" in names for names in server.card.in_hp)


def test_a_race_needs_graphs():
    with pytest.raises(ServeRefused, match="race=True times CUDA graphs"):
        frozen(wide(), graphs=False, race=True)
