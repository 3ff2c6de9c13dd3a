"""A recorded pass, without a GPU: what it hands to recordings, and what it makes of their results."""

import itertools

import pytest
import torch

from loka.nn import site_ops

launches = pytest.importorskip("loka.nn.site_launches", reason="needs triton")

ROW, TENSOR, APART = "torch:rowwise_e4m3", "torch:tensorwise_e4m3", "emulated:rowwise_e4m3"
CANDIDATES = (ROW, TENSOR, APART, "hp")  # no GEMM of an emulated kernel is recorded


@pytest.fixture
def recording(monkeypatch):
    """Has passes recorded on this device; `recorded` makes each, and notes its key."""
    keys = []

    def recorded(key, given, make, keep, rebuild):
        keys.append(key)
        return make()

    def begin(replacement=recorded):
        monkeypatch.setattr(launches, "INTERPRETED", False)
        monkeypatch.setattr(launches, "recorded", replacement)
        monkeypatch.setattr(site_ops, "_is_recorded", lambda run, device: launches.can_record(run))
        forget()
        return keys

    yield begin
    forget()


def forget():
    for cache in (site_ops._forward_of, site_ops._backward_of):
        cache.cache_clear()


def one_pass(names, want):
    """y, dx, dW and health of a pass in which `want` gradients of x and of the weight are wanted."""
    torch.manual_seed(0)
    x, dy = torch.randn(24, 32, dtype=torch.bfloat16), torch.randn(24, 48, dtype=torch.bfloat16)
    weight, health = torch.randn(48, 32), torch.zeros(3, 3, dtype=torch.int64)
    output, grad_input, grad_weight = names
    keep = (want[1] and "hp" not in (output, grad_weight), want[0] and "hp" not in (output, grad_input))
    y, kept_x, x_scale, kept_weight, weight_scale = site_ops.forward_parts(x, weight, health, names, keep)
    kept = (kept_x if keep[0] else x, x_scale, kept_weight if keep[1] else weight, weight_scale)
    return y, *site_ops.backward_parts(dy, *kept, health, names[1:], want, 32, weight.dtype), health


@pytest.mark.parametrize("want", [(True, True), (True, False), (False, True)])
def test_a_recorded_pass_computes_what_its_parts_do(recording, want):
    combinations = list(itertools.product(CANDIDATES, repeat=3))
    apart = [one_pass(names, want) for names in combinations]
    keys = recording()
    recorded = []
    for names, right in zip(combinations, apart, strict=True):
        keys.clear()
        for found, expected in zip(one_pass(names, want), right, strict=True):
            assert torch.equal(found, expected), names
        recorded.append(len(keys))
    wanted = [[names[place] for place in (1, 2) if want[place - 1]] for names in combinations]
    assert recorded == [
        (names[0] in (ROW, TENSOR))
        + (names[0] != "hp" and APART not in gradients and any(name != "hp" for name in gradients))
        for names, gradients in zip(combinations, wanted, strict=True)
    ]


@pytest.mark.parametrize("names", [(ROW, "hp", "hp"), (APART, "hp", "hp")])
def test_a_weight_on_another_device_is_refused(recording, names):
    """A recording is made again with addresses, which name memory that the device may not read, or not yet."""
    recording(lambda *given: [torch.zeros(24, 48), None, None, None, None])
    x, health = torch.randn(24, 32), torch.zeros(3, 3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="input is on cpu, the weight on meta"):
        site_ops.forward_parts(x, torch.empty(48, 32, device="meta"), health, names, (False, False))
