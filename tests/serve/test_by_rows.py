import pytest
import torch
from served import POW2, ROW, Tower, calibration, converted, plan_for, rows, tower

from loka.core.exceptions import PlanMismatch, ServeRefused
from loka.serve import freeze, load
from loka.serve.sites import frozen_sites
from loka.serve.watch.monitor import EVERY, WINDOW

BUCKETS = (8, 16, 64)
FEW, MANY = {"first": ROW}, {"first": ROW, "second": ROW}  # `second` has no bias, so that bits can be equal


def frozen(model=None):
    model = tower() if model is None else model
    plans = {16: plan_for(model, FEW), 64: plan_for(model, MANY)}
    return freeze(model, plans, calibration=calibration(), autocast=torch.bfloat16, buckets=BUCKETS)


def by_plan(candidates, count, seed=0):
    model = converted(tower(seed), plan_for(tower(seed), candidates))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model(*rows(count))


@pytest.mark.parametrize(("count", "candidates"), [(8, FEW), (16, FEW), (64, MANY)])
def test_each_bucket_answers_by_its_plan(count, candidates):
    server = frozen()
    assert torch.equal(server(rows(count)).output, by_plan(candidates, count))
    other = MANY if candidates is FEW else FEW
    assert not torch.equal(server(rows(count)).output, by_plan(other, count))


def test_a_forward_that_asks_another_server_goes_on_by_the_plan_of_its_bucket():
    """Behind that answer its sites ran in FP8, as if no bucket had them in high precision; and its alarm saw the other
    server's sites for its own, of the same names."""
    other = frozen()

    class Asking(Tower):
        def forward(self, dense, ids):
            other((dense * 1000, ids))
            return super().forward(dense, ids)

    torch.manual_seed(0)
    server = frozen(Asking().eval())
    assert torch.equal(server(rows(8)).output, by_plan(FEW, 8))
    for turn in range(EVERY * WINDOW):
        server(rows(8, seed=turn))
    assert server.alarms() == ()


def test_parts_of_a_long_request_go_by_their_buckets():
    server = frozen()
    answer = server(rows(72))
    assert answer.buckets == (64, 8)
    last = [tensor[64:] for tensor in rows(72)]
    assert torch.equal(answer.output[64:], server(tuple(last)).output)


def test_it_says_what_runs_where_and_keeps_the_weight_for_it():
    card = frozen().card
    assert card.in_hp == (("second",), ("second",), ())
    assert card.dropped == ("first.weight",)
    assert "16 rows: 1 of 2 sites run in high precision" in str(card)
    assert "second (in high precision for some numbers of rows)" in str(card)


def test_it_is_saved_loaded_and_refreshed(tmp_path):
    server = frozen()
    server.save(tmp_path)
    loaded = load(tmp_path, tower(seed=5))
    for count in BUCKETS:
        assert torch.equal(loaded(rows(count)).output, server(rows(count)).output)
    assert loaded.refresh(tower(seed=1).state_dict()) == 2
    assert torch.equal(loaded(rows(16)).output, by_plan(FEW, 16, seed=1))
    assert torch.equal(loaded(rows(64)).output, by_plan(MANY, 64, seed=1))
    assert {name: set(site.in_hp) for name, site in frozen_sites(loaded.current.module).items()} == {
        "first": set(),
        "second": {8, 16},
    }


def test_what_cannot_be_is_refused():
    model = tower()
    few, many = plan_for(model, FEW), plan_for(model, MANY)
    given = {"calibration": calibration(), "buckets": BUCKETS}
    with pytest.raises(ServeRefused, match=r"(?s)no plan for 64 rows.*up to 16"):
        freeze(model, {16: few}, **given)
    with pytest.raises(ServeRefused, match="no plan for 64 rows"):
        freeze(model, {}, **given)
    other = plan_for(model, {"first": POW2})
    with pytest.raises(ServeRefused, match=rf"(?s)first: {POW2} from 8 rows, {ROW} from 64 rows.*force="):
        freeze(model, {16: other, 64: many}, **given)
    with pytest.raises(PlanMismatch):
        freeze(model, {16: plan_for(torch.nn.Sequential(torch.nn.Linear(4, 4)), {"0": ROW}), 64: many}, **given)
    with pytest.raises(ServeRefused, match="a package has one"):
        frozen().package("model.pt2")
