"""A recorded pass, without a GPU: what it hands to recordings, and what it makes of their results."""

import itertools
from collections import Counter

import pytest
import torch

from loka.kernels.gemm.run import kernel_runs, reset_kernel_runs
from loka.nn import site_launches, site_ops

pytest.importorskip("triton", reason="needs triton")
pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch has no scales by row on a CPU before 2.13")

ROW, TENSOR, APART = "torch:rowwise_e4m3", "torch:tensorwise_e4m3", "emulated:rowwise_e4m3"
POWERS = "torch:rowwise_e4m3_pow2"
CANDIDATES = (ROW, TENSOR, APART, "hp")  # no GEMM of an emulated kernel is recorded


@pytest.fixture
def recording(monkeypatch):
    """Has passes recorded on this device; `recorded` makes each, and notes its key."""
    keys = []

    def recorded(key, given, make, keep, rebuild):
        keys.append(key)
        return make()

    def begin(replacement=recorded):
        monkeypatch.setattr("loka.kernels.triton.pack.INTERPRETED", False)
        monkeypatch.setattr("loka.kernels.triton.launch.recorded", replacement)
        monkeypatch.setattr(
            site_ops, "can_record", lambda run, device: site_launches.can_record(run, torch.device("cuda"))
        )
        forget()
        return keys

    yield begin
    forget()


def forget():
    for cache in (site_ops._forward_of, site_ops._backward_of):
        cache.cache_clear()


def one_pass(names, want, *, dtypes=(torch.bfloat16, torch.float32), turned=None):
    """y, dx, dW and health of a pass in which `want` gradients of x and of the weight are wanted."""
    torch.manual_seed(0)

    def made(name, dtype, rows, columns):
        return (torch.randn(columns, rows).t() if name == turned else torch.randn(rows, columns)).to(dtype)

    x, dy = made("x", dtypes[0], 24, 32), made("dy", dtypes[0], 24, 48)
    weight = made("weight", dtypes[1], 48, 32)
    health = torch.zeros(3, 3, dtype=torch.int64)
    output, grad_input, grad_weight = names
    keep = (want[1] and "hp" not in (output, grad_weight), want[0] and "hp" not in (output, grad_input))
    y, kept_x, x_scale, kept_weight, weight_scale = site_ops.forward_parts(x, weight, health, names, keep)
    kept = (kept_x if keep[0] else x, x_scale, kept_weight if keep[1] else weight, weight_scale)
    return y, *site_ops.backward_parts(dy, *kept, health, names[1:], want, 32, weight.dtype), health


@pytest.mark.parametrize("want", [(True, True), (True, False), (False, True)])
def test_a_recorded_pass_computes_what_its_parts_do(recording, want):
    combinations = list(itertools.product(CANDIDATES, repeat=3))
    reset_kernel_runs()
    apart = [one_pass(names, want) for names in combinations]
    ran = kernel_runs()
    reset_kernel_runs()
    keys = recording()
    recorded = []
    for names, right in zip(combinations, apart, strict=True):
        keys.clear()
        for found, expected in zip(one_pass(names, want), right, strict=True):
            assert torch.equal(found, expected), names
        recorded.append(len(keys))
    assert kernel_runs() == ran
    wanted = [[names[place] for place in (1, 2) if want[place - 1]] for names in combinations]
    assert recorded == [
        (names[0] in (ROW, TENSOR))
        + (names[0] != "hp" and APART not in gradients and any(name != "hp" for name in gradients))
        for names, gradients in zip(combinations, wanted, strict=True)
    ]


def test_passes_that_differ_in_anything_have_recordings_of_their_own(recording):
    keys = recording()
    rows, both, found = (ROW, ROW, ROW), (True, True), {}

    def noted(label, names=rows, want=both, **more):
        pair = []
        for _ in range(2):
            keys.clear()
            one_pass(names, want, **more)
            pair.append(tuple(keys))
        assert pair[0] == pair[1], "a pass that comes again has the recordings that it had"
        found[label] = pair[0]

    noted("plain")
    for place, label in enumerate(("output", "grad_input", "grad_weight")):
        noted(label, names=(*rows[:place], POWERS, *rows[place + 1 :]))
    noted("no dx", want=(False, True))
    noted("no dW", want=(True, False))
    noted("wide", dtypes=(torch.float32, torch.float32))
    noted("narrow weight", dtypes=(torch.bfloat16, torch.bfloat16))
    for name in ("x", "dy", "weight"):
        noted(name, turned=name)
    forward, backward = (Counter(pair[place] for pair in found.values()) for place in (0, 1))
    assert {label for label, pair in found.items() if forward[pair[0]] > 1} == {"plain", "dy"}
    given_alike = {label for label, pair in found.items() if backward[pair[1]] > 1}
    assert given_alike == {"plain", "output", "x", "weight"}, "of what forward kept"


@pytest.mark.parametrize("names", [(ROW, "hp", "hp"), (APART, "hp", "hp")])
def test_a_weight_on_another_device_is_refused(recording, names):
    """A recording is made again with addresses, which name memory that the device may not read, or not yet."""
    recording(lambda *given: [torch.zeros(24, 48), None, None, None, None])
    x, health = torch.randn(24, 32), torch.zeros(3, 3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="input is on cpu, the weight on meta"):
        site_ops.forward_parts(x, torch.empty(48, 32, device="meta"), health, names, (False, False))
