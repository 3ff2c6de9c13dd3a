from dataclasses import replace

import pytest
from command_line import loka as run
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import EXAMPLE, across, exactly, network, row

from loka.core.exceptions import LokaError
from loka.core.records.network import Network, Own
from loka.scaling.cluster.collectives import Wire, wire_us
from loka.scaling.cluster.fitting import MEASURED, MeasuredStep, _root, parsed_step

STEPS = {"ddp": (2, 9000.0, 7000.0), "fsdp2": (2, 9500.0, 7600.0), "hsdp/8": (16, 12_000.0, 11_000.0)}
MANY = {"gpus": (2, 4, 16), "groups": (8,), "network": network(per_node=16)}


def steps(*engines, planned=True):
    return [
        MeasuredStep(engine=one, gpus=STEPS[one][0], bf16=STEPS[one][1], planned=STEPS[one][2] if planned else None)
        for one in engines
    ]


@pytest.mark.slow
def test_a_measured_step_is_told_as_it_was_measured():
    """Whatever was guessed of what lies between GEMMs; and its notes say how far off that was."""
    for share in (0.1, 1.0):
        given_ = MANY | {"network": replace(MANY["network"], elementwise_share=exactly(share))}
        found = across(**given_, measured=steps(*STEPS))
        for engine, (gpus, bf16, planned) in STEPS.items():
            one = row(found, gpus, engine, "-" if engine == "ddp" else "bf16")
            assert (one.bf16.value, one.planned.value) == pytest.approx((bf16, planned), rel=1e-5)
            assert one.bf16_parts.gemms + one.bf16_parts.other + one.bf16_parts.exposed == pytest.approx(bf16, rel=1e-5)
        assert sum("fitted to a step on" in note for note in found.notes) == 3
        assert {*MEASURED.values()} <= found.assumptions.keys()


@pytest.mark.slow
def test_what_differs_with_the_number_of_gpus_is_told_by_the_network():
    """A step of DDP whose collectives are all hidden is as long on four GPUs; an eighth of the wire makes it wait."""
    fast, slow = (across(gpus=(4,), network=network(inside=(2, gbps)), measured=steps("ddp")) for gbps in (1000, 8))
    assert row(fast, 4, "ddp", "-").bf16.value == pytest.approx(9000, rel=1e-3)
    assert row(slow, 4, "ddp", "-").bf16.value > 9000 * 1.1


def test_the_ends_hold_what_another_run_may_take():
    found = row(across(gpus=(2,), measured=steps("ddp")), 2, "ddp", "-")
    assert (found.bf16.low, found.bf16.high) == pytest.approx((9000 * 0.97, 9000 * 1.03), rel=1e-4)
    assert found.speedup.low == pytest.approx(9 / 7 * 0.97 / 1.03, rel=1e-3)
    assert found.speedup.high == pytest.approx(9 / 7 * 1.03 / 0.97, rel=1e-3)


def test_a_step_in_bf16_alone_fits_both():
    plain = row(across(gpus=(2,), network=network(inside=(1e-6, 1e6))), 2, "ddp", "-")
    fitted = row(
        across(gpus=(2,), network=network(inside=(1e-6, 1e6)), measured=steps("ddp", planned=False)), 2, "ddp", "-"
    )
    assert fitted.bf16.value == pytest.approx(9000, rel=1e-4)
    assert MEASURED[False] in fitted.swings
    assert MEASURED[True] not in fitted.swings
    assert fitted.speedup.value == pytest.approx(plain.speedup.value, rel=1e-3)  # nothing but compute takes time


@settings(max_examples=50)
@given(
    pieces=st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)), min_size=1, max_size=6),
    wanted=st.floats(1e-2, 1e6),
)
def test_the_root_of_what_is_convex_and_rises(pieces, wanted):
    def total(longer):
        return max(wait + work * longer for wait, work in [*pieces, (0.0, 1.0)])

    found = _root(total, wanted)
    if total(0.0) >= wanted:
        assert found == 0
    else:
        assert total(found) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: across(gpus=(4,), engines=("ddp",), measured=steps("fsdp2")), "at most one for each of ddp"),
        (lambda: across(gpus=(4,), measured=steps("ddp", "ddp")), "there is one for each engine"),
        (lambda: across(gpus=(16,), measured=[replace(steps("ddp")[0], gpus=12)]), "12 GPUs do not fill nodes of 8"),
        (lambda: across(**MANY, measured=[replace(steps("hsdp/8")[0], gpus=8)]), "8 GPUs are not two or more groups"),
        (
            lambda: across(gpus=(4,), network=network(inside=(2, 1)), measured=steps("ddp")),
            "its collectives alone are told to take",
        ),
        (lambda: MeasuredStep(engine="ddp", gpus=2, bf16=0.0), "times above 0"),
        (lambda: parsed_step("ddp@2"), "ddp@2=29.9/22.9"),
        (lambda: parsed_step("ddp@2=1/2/3"), "ddp@2=29.9/22.9"),
    ],
)
def test_steps_that_cannot_be(wrong, told):
    with pytest.raises(LokaError) as raised:
        wrong()
    assert told in str(raised.value)


@pytest.mark.slow
def test_the_command(tmp_path):
    options = ("--network", EXAMPLE, "--gpus", "2,8", "--engine", "ddp")
    text = run("scale", "dcnv2:mlperf", *options, "--step", "ddp@2=5.5/4.25", cwd=tmp_path)
    assert "ddp: fitted to a step on 2 GPUs, 5.500 ms in bf16 and 4.250 by plan" in text
    assert parsed_step("hsdp/8@16=61.2") == MeasuredStep(engine="hsdp/8", gpus=16, bf16=61_200.0)
    for arguments, told in ((("--step", "ddp@2=5.5"), "--network too"), ((*options, "--step", "2"), "--step '2'")):
        assert told in run("scale", "dcnv2:mlperf", *arguments, cwd=tmp_path, fails=2)


CURVE = ((100e3, 0.0), (1e6, 6.0), (8e6, 20.0))


def test_bytes_take_what_they_took():
    """Between two sizes by a line, beyond the last one at its bandwidth; a link twice as fast halves it."""
    own = {"all_gather": Own(latency=1.0, bandwidth=1.0, carried=CURVE)}
    plain = network(inside=(1e-9, 100), launch=1e-9)
    measured = replace(plain, inside=replace(plain.inside, own=own))
    for moved, us in ((0, 0), (50e3, 0), (1e6, 6), (4.5e6, 13), (16e6, 40)):
        told = wire_us(Wire("all_gather", moved * 4 / 3), 4, measured)
        assert told == pytest.approx(us, abs=1e-6)
        assert wire_us(Wire("all_reduce", moved), 4, measured) == wire_us(Wire("all_reduce", moved), 4, plain)
    wide = replace(measured, inside=replace(measured.inside, bandwidth_gbps=replace(exactly(100), high=200)))
    assert wire_us(Wire("all_gather", 16e6 * 4 / 3), 4, wide, {"bandwidth inside a node": "high"}) == pytest.approx(20)


@pytest.mark.parametrize(
    "wrong", [None, ((1e6, 2.0), (1e5, 3.0)), ((1e5, 3.0), (1e6, 2.0)), ((0.0, 1.0),), ((1e5, 0.0),)]
)
def test_curves_of_a_file(wrong, tmp_path):
    net, curve = Network.load(EXAMPLE), wrong or CURVE
    own = {"all_gather": Own(latency=1.0, bandwidth=1.0, carried=curve)}
    made = replace(net, inside=replace(net.inside, own=own))
    made.save(tmp_path / "net.json")
    if wrong is None:
        assert Network.load(tmp_path / "net.json") == made
    else:
        with pytest.raises(LokaError, match="carried"):
            Network.load(tmp_path / "net.json")
