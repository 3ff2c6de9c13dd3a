import random
import time
from dataclasses import replace

import pytest
import torch
from command_line import loka as run
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import EXAMPLE, ROWS, across, exactly, network, row, tower, with_module
from torch import nn

import loka
from loka.core.budget import Budget
from loka.core.error import Estimate
from loka.core.exceptions import LokaError, PlanMismatch
from loka.core.problem import linear_problem
from loka.core.recipe import Gemm
from loka.core.records.across import Across
from loka.core.records.network import Network
from loka.core.records.plan import Decision, Plan
from loka.nn.linears import signature
from loka.scaling.cluster.across import _inputs, _ratio, scale_across
from loka.scaling.cluster.compute import forecast_times, mean_rate, placed
from loka.scaling.cluster.engines import Matmul, traced_step
from loka.scaling.cluster.pricing import GAINS, Formats, step_of
from loka.scaling.cluster.schedule import Replicate, schedule
from loka.scaling.inputs import fake_batch, fake_mode, fake_model


def plan_of(model, *, rows=ROWS, candidate="torch:rowwise_e4m3_pow2"):
    """Every GEMM took 100 us in bf16 and takes 50 in eight bits, 10 of them saved by a neighbour."""
    decisions = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        for gemm in Gemm:
            problem = linear_problem(
                gemm,
                rows=rows,
                in_features=layer.in_features,
                out_features=layer.out_features,
                dtype="float32",
                target="sm_90",
            )
            decision = Decision(
                path=path,
                problem=problem,
                candidate=candidate,
                reason="made up",
                microseconds=Estimate(50.0, 45.0, 55.0),
                hp_microseconds=Estimate(100.0, 90.0, 110.0),
                saved_us=10.0,
            )
            decisions[decision.site] = decision
    machine = loka.scale(model, torch.randn(4, 2048), batch_size=ROWS).machine
    return Plan(model=signature(model), machine=machine, budget=Budget(), timed=True, decisions=decisions)


def test_a_step_on_ddp_by_hand():
    """Nothing takes time but GEMMs of 100 and 40 us and two buckets; 12.6 M parameters in three layers.

    DDP's first bucket is closed by the first layer that fills 1 MiB, the second by 25 MiB of gradients: one
    layer (4 M + 2 k elements of 4 bytes) passes each limit. Eight GPUs in a node: a launch and a tree's or
    ring's 2 x 7 hops; twice 7 / 8 of a bucket in bf16 over the link.
    """
    model = tower()
    quiet = replace(network(inside=(2, 100), launch=1), elementwise_share=exactly(1e-12), memory_gbps=exactly(1e12))
    found = row(across(model, network=quiet, plan=plan_of(model), gpus=(8,)), 8, "ddp", "-")
    mode = fake_mode()
    step = traced_step(
        fake_model(model, mode), fake_batch(torch.randn(4, 2048), mode, rows=ROWS), mode=mode, engine="ddp"
    )
    sizes = [sum(p.numel for p in e.params) for e in step.events if type(e).__name__ == "Reduced"]
    assert sum(sizes) == 3 * (2048 * 2048 + 2048)
    assert len(sizes) > 1
    us = [1 + 2 * 7 * 2 + 2 * size * 2 * 7 / 8 / 100e3 for size in sizes]
    for each, told in ((100.0, found.bf16.value), (40.0, found.planned.value)):
        now = wire = 0.0
        buckets = iter(us)
        for event in step.events:
            if isinstance(event, Matmul):
                now += each
            elif type(event).__name__ == "Reduced":
                wire = max(wire, now) + next(buckets)
        assert told == pytest.approx(max(now, wire), rel=1e-6)
    assert found.bf16_parts.gemms == pytest.approx(8 * 100)  # the first layer's input wants no gradient
    assert found.parts.gemms == pytest.approx(8 * 40)


def test_ends_are_those_of_all_inputs_at_once():
    """GEMMs in bf16 110 us at most; by plan 110 / (100 / (55 - 10)) = 49.5."""
    model = tower()
    quiet = replace(
        network(inside=(1e-9, 1e9), launch=1e-9), elementwise_share=exactly(1e-12), memory_gbps=exactly(1e12)
    )
    found = row(across(model, network=quiet, plan=plan_of(model), gpus=(8,)), 8, "ddp", "-")
    assert (found.bf16.low, found.bf16.value, found.bf16.high) == pytest.approx((720, 800, 880))
    assert found.planned.high == pytest.approx(8 * 49.5)
    assert (found.speedup.low, found.speedup.value, found.speedup.high) == pytest.approx((100 / 45, 100 / 40, 100 / 35))
    assert found.swings[GAINS].low == pytest.approx(100 / 45)
    assert found.swings[GAINS].high == pytest.approx(100 / 35)


def test_regions_may_spare_bytes_between_gemms():
    """Where these are all that takes time, 0.7 of them, at the least, are 1 / 0.7 times as fast."""
    found = row(across(network=network(inside=(1e-9, 1e9), launch=1e-9, memory=1e-6), gpus=(8,)), 8, "ddp", "-")
    assert (found.speedup.low, found.speedup.value) == pytest.approx((1, 1), rel=1e-3)
    assert 1.2 < found.speedup.high < 1 / 0.7  # Adam's bytes stay


def test_every_number_has_its_ends_and_its_label():
    found = across(network=Network.load(EXAMPLE))
    text = str(found)
    for one in found.rows:
        for estimate in (one.bf16, one.planned, one.speedup, one.format_gain):
            assert estimate.low <= estimate.value <= estimate.high
        for name, swing in one.swings.items():  # one input alone never leaves the interval
            assert one.speedup.low - 1e-9 <= min(swing.low, swing.high), name
            assert one.speedup.high + 1e-9 >= max(swing.low, swing.high), name
    for name, quantity in found.assumptions.items():
        assert f"{name}: {quantity.value:.4g} [{quantity.low:.4g}, {quantity.high:.4g}] assumed: " in text
    for told in ("interpolated", "Falsified by", "not in it", "stragglers", "taken to have"):
        assert told in text, told


def test_where_the_wire_is_all_there_is_eight_bit_gemms_do_not_pay_and_half_the_bytes_do():
    slow = network(inside=(1e-6, 0.5), between=(1e-6, 0.05), launch=1e-6, memory=1e6)
    found = across(network=slow)
    plain = row(found, 64, "fsdp2", "bf16")
    assert plain.speedup.high < 1.01
    assert plain.parts.exposed > 20 * plain.parts.gemms
    gathered = row(found, 64, "fsdp2", "fp8")
    assert gathered.parts.sent < 0.70 * plain.parts.sent  # two gathers of three by half
    assert gathered.format_gain.low > 1.3
    answer = next(line for line in found.answers() if line.startswith("fsdp2"))
    assert "they do not pay" in answer
    assert "64 (1.00x" in answer
    stops = [line for line in found.answers() if "stop paying" in line]
    assert ["from 8 GPUs on" in line for line in stops] == [True, True]
    for low, told in ((1.0, "from 64 GPUs on"), (1.1, "nowhere up to 64 GPUs")):
        gains = {8: Estimate(1.2, 1.1, 1.3), 64: Estimate(1.2, low, 1.3)}
        paid = replace(found, rows=tuple(replace(one, speedup=gains[one.gpus]) for one in found.rows))
        assert sum(told in line for line in paid.answers()) == 2


def test_int8_gradients_send_each_byte_by_its_own_card():
    """Rings add up inside a node first; an all-to-all of half the bytes sends four times as much between."""
    slow = network(inside=(1e-6, 1e6), between=(1e-6, 0.05), launch=1e-6, memory=1e9)
    found = across(network=slow)
    assert row(found, 64, "fsdp2", "bf16", "int8").format_gain.high < 1
    inside = network(inside=(1e-6, 0.5), launch=1e-6, memory=1e9)
    assert row(across(network=inside, gpus=(8,)), 8, "fsdp2", "bf16", "int8").format_gain.low > 1.1


def test_eight_bit_gradients_are_hidden_under_fsdp2_and_not_under_ddp():
    found = across(gpus=(8,))
    ddp, fsdp2 = row(found, 8, "ddp", "-", "int8").parts, row(found, 8, "fsdp2", "bf16", "int8").parts
    assert ddp.exposed == pytest.approx(ddp.wire)
    assert fsdp2.exposed < 0.9 * fsdp2.wire


@pytest.fixture(scope="module")
def prepared():
    """A step of each engine on 64 GPUs, with its times; HSDP's in groups of 16."""
    model, mode = tower(), fake_mode()
    found = loka.scale(model, torch.randn(4, 2048), batch_size=ROWS)
    times, steps = forecast_times(found), {}
    for engine, gather in (("ddp", "-"), ("fsdp2", "bf16"), ("hsdp", "bf16")):
        formats, group = Formats(gather, "bf16"), 16 if engine == "hsdp" else 0
        batch = fake_batch(torch.randn(4, 2048), mode, rows=ROWS)
        step = traced_step(fake_model(model, mode), batch, mode=mode, engine=engine)
        where = placed(step, times)
        steps[engine] = step_of(step, where, 64, formats=formats, in_fp8=frozenset(), group=group)
    return steps, mean_rate(times)


@pytest.mark.parametrize("per_node", [8, 16, 32])
def test_replicas_have_cards_of_their_own_where_a_group_is_a_node(prepared, per_node):
    steps, rate = prepared
    items = steps["hsdp"].items(network(per_node=per_node), 64, rate=rate, planned=False, ends={})
    assert {item.apart for item in items if isinstance(item, Replicate)} == {per_node == 16}


_factors = st.floats(1, 20)


@settings(max_examples=40)
@given(engine=st.sampled_from(["ddp", "fsdp2", "hsdp"]), planned=st.booleans(), factors=st.tuples(*[_factors] * 6))
def test_a_slower_network_never_makes_a_step_faster(prepared, engine, planned, factors):
    steps, rate = prepared
    a, b, c, d, e, f = factors

    def total(net):
        return schedule(steps[engine].items(net, 64, rate=rate, planned=planned, ends={})).total

    fast = network(inside=(2, 300), between=(5, 40), launch=8, memory=3000, share=0.05)
    slow = network(inside=(2 * a, 300 / b), between=(5 * c, 40 / d), launch=8 * e, memory=3000 / f, share=0.05 * f)
    assert total(slow) >= total(fast)


def test_the_plan_of_another_model():
    with pytest.raises(PlanMismatch, match="of another model"):
        across(tower(depth=2), plan=plan_of(tower()))
    with pytest.raises(PlanMismatch) as refused:
        across(tower(depth=12), plan=plan_of(tower()))
    assert (len(refused.value.why), refused.value.why[-1]) == (9, "and 1 more")


def test_a_plan_at_other_shapes_is_not_carried_over():
    with pytest.raises(PlanMismatch, match="measured at 4096x2048x2048, runs at 8192x2048x2048"):
        across(plan=plan_of(tower(), rows=4096))


def test_a_plan_measured_with_other_weights_is_not_carried_over():
    plan = plan_of(tower())
    decisions = {n: replace(d, problem=replace(d.problem, dtype="bfloat16")) for n, d in plan.decisions.items()}
    with pytest.raises(PlanMismatch, match="measured with weights in bfloat16, here they are in float32"):
        across(plan=replace(plan, decisions=decisions))


def test_a_plan_without_times():
    with pytest.raises(LokaError, match="not timed"):
        across(plan=replace(plan_of(tower()), timed=False))
    plan = plan_of(tower())
    first = next(iter(plan.decisions))
    untimed = replace(plan.decisions[first], hp_microseconds=None)
    with pytest.raises(PlanMismatch, match="no time was measured"):
        across(plan=replace(plan, decisions={**plan.decisions, first: untimed}))


def test_shapes_that_nobody_measured_near_are_not_guessed():
    with pytest.raises(LokaError, match=r"100 % of the sites' FLOPs are at shapes that nobody measured near"):
        across(batch_size=16)
    model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 7))
    few = across(model, gpus=(8,))
    told = [note for note in few.notes if "of unknown time" in note]
    assert bool(told) == (loka.scale(model, torch.randn(4, 2048), batch_size=ROWS).unknown_share > 0)


@pytest.mark.parametrize(("gpus", "told"), [((12,), "multiple of 8"), ((1,), "2 to 8"), ((), "no number of GPUs")])
def test_numbers_of_gpus(gpus, told):
    with pytest.raises(LokaError, match=told):
        across(gpus=gpus)


def test_a_table_left_out_takes_no_time():
    with fake_mode():
        models = [nn.Sequential(nn.EmbeddingBag(rows, 2048), tower()) for rows in (10, 10_000_000)]
    ids = torch.zeros(4, 3, dtype=torch.long)
    asked = {"network": network(), "gpus": (8,), "batch_size": ROWS}
    few, many = (scale_across(model, ids, **asked).rows for model in models)
    assert [row.bf16_parts.other for row in few] == [row.bf16_parts.other for row in many]


def test_products_that_are_no_site_take_time_too():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2048, 2048)

        def forward(self, x):
            y = self.layer(x)
            return y @ (y.transpose(0, 1) @ y)

    quiet = replace(network(), elementwise_share=exactly(1e-12), memory_gbps=exactly(1e12))
    found = row(across(Attends(), network=quiet, gpus=(8,)), 8, "ddp", "-")
    # Two sites' GEMMs (the input wants no gradient); 2 products forward, twice as many backward, as large.
    assert found.bf16_parts.other == pytest.approx(found.bf16_parts.gemms * 6 / 2, rel=0.01)
    assert found.bf16.high > found.bf16.value + 1.9 * found.bf16_parts.other  # up to three times as long


def test_a_plain_parameter_has_copies_and_is_not_gathered_in_fp8():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(2048, 2048))

        def forward(self, x):
            return nn.functional.linear(torch.relu(nn.functional.linear(x, self.w)), self.w)

    found = across(Plain(), gpus=(8,), batch_size=4 * ROWS)
    assert found.memory["8 ddp"]["FP8 copies"] == 2 * 2048 * 2048
    assert any("FP8 gather: 0 weights" in note for note in found.notes)


def test_memory_by_hand():
    """Autograd saves inputs of three layers in bf16, and bf16 weights of two that autocast made."""
    found = across(gpus=(8, 64))
    n, rows = 2048 * 2048, ROWS * 2048
    whole = 4 * 3 * (n + 2048)
    assert found.memory["64 ddp"] == {
        "parameters": whole, "gradients": 2 * whole, "optimizer": 2 * whole, "units": 0,
        "FP8 copies": 2 * 3 * n, "activations": 2 * 3 * rows + 2 * 2 * n, "tables": 0,
    }  # fmt: skip
    assert found.memory["64 fsdp2"] == {
        "parameters": whole / 64, "gradients": whole / 64, "optimizer": 2 * whole / 64,
        "units": 2 * 2 * 2 * (n + 2048), "FP8 copies": 2 * 2 * n, "activations": 2 * 3 * rows,
        "tables": 0,
    }  # fmt: skip
    no_gather = across(plan=plan_of(tower(), candidate="torch:rowwise_e4m3"), gpus=(8,))
    assert no_gather.memory["8 ddp"]["FP8 copies"] == 2 * 3 * n, "it was 0 where no weight travels in FP8"
    assert "The GPU has 151 GB." in str(found)
    small = replace(found, capacity=sum(found.memory["64 fsdp2"].values()) + 1)
    assert "WARNING: too little for 8 ddp, 8 fsdp2, 64 ddp." in str(small)


def test_saving_and_loading(tmp_path):
    found = across(gpus=(8,))
    found.save(tmp_path / "across.json")
    assert Across.load(tmp_path / "across.json") == found


MODELS = """
import torch
from torch import nn

def build():
    layers = [nn.Linear(2048, 2048) for _ in range(3)]
    return nn.Sequential(*layers), torch.randn(4, 2048)
"""


@pytest.fixture
def folder(tmp_path):
    yield from with_module(tmp_path, "my_many_models", MODELS)


def test_the_command(folder):
    text = run(
        "scale", "my_many_models:build", "--network", EXAMPLE, "--gpus", "8,1024", "--unit", "0",
        "--group", "8", "--out", "across.json", cwd=folder,
    )  # fmt: skip
    saved = Across.load(folder / "across.json")
    assert {one.gpus for one in saved.rows} == {8, 1024}
    assert {one.engine for one in saved.rows} == {"ddp", "fsdp2", "hsdp/8"}
    assert saved.units == ("0",)
    assert saved.batch_size == 8192
    assert all(line in text for line in saved.answers())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--network", "none.json"), ("as a network", "examples/h200-ib.json")),
        (("--network", EXAMPLE, "--gpus", "12"), ("12 GPUs do not fill nodes of 8",)),
        (("--network", EXAMPLE, "--gpus", "many"), ("are no numbers", "8,64")),
        (("--network", EXAMPLE, "--plan", "none.json"), ("none.json",)),
        (("--network", EXAMPLE, "--unit", "blocks.*"), ("no module", "'blocks.*'")),
        (("--unit", "blocks.*"), ("--network too",)),
        (("--group", "8"), ("--network too",)),
        (("--gpus", "8"), ("--network too",)),
        (("--qcomm", "int8"), ("--network too",)),
        (("--network", EXAMPLE, "--gpus", "8,0"), ("are no numbers",)),
        (("--network", EXAMPLE, "--group", "3"), ("nodes of 8", "one of 2, 4, 8, 16")),
        (("--network", EXAMPLE, "--engine", "zero"), ("engines zero", "ddp, fsdp2, hsdp")),
    ],
)
def test_errors_of_the_command(folder, arguments, told):
    text = run("scale", "my_many_models:build", *arguments, cwd=folder, fails=2)
    assert "Traceback" not in text
    for part in told:
        assert part in text, text


@pytest.mark.slow
def test_ten_seconds_for_a_hundred_sites():
    """Of processor time, which other work on the machine does not lengthen; four numbers of GPUs."""
    begun = time.process_time()
    found = scale_across(
        nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(100))),
        torch.randn(4, 1024),
        network=Network.load(EXAMPLE),
        batch_size=ROWS,
    )
    assert time.process_time() - begun < 10
    assert len(found.units) == 100
    assert {one.gpus for one in found.rows} == {8, 64, 256, 1024}


def test_no_corner_lies_far_outside_an_interval(prepared):
    """The search for a ratio's ends, against 400 draws of all inputs' ends at once."""
    net, (steps, rate) = Network.load(EXAMPLE), prepared
    inputs = _inputs(net)
    drawn = random.Random(0)
    for engine, step in steps.items():

        def ratio(ends, step=step):
            bf16, planned = (
                schedule(step.items(net, 64, rate=rate, planned=planned, ends=ends)).total for planned in (False, True)
            )
            return bf16 / planned

        found, _ = _ratio(ratio, inputs)
        corners = [ratio({name: drawn.choice(("low", "high")) for name in inputs}) for _ in range(400)]
        assert found.low <= min(corners) * 1.001, engine
        assert found.high >= max(corners) * 0.999, engine
