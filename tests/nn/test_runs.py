import copy

import pytest
import torch
from sites import convert_layers
from torch import nn

from loka.nn import fp8_runs, reset_health
from loka.nn.fp8_state_dict import carry_over, fp8_state_dict, load_fp8_state_dict

E4M3 = "emulated:tensorwise_e4m3"
X = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))


def made(**layers):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    convert_layers(model, {path.removeprefix("at_"): names for path, names in layers.items()})
    return model


@pytest.fixture
def model():
    return made(at_0=(E4M3, "hp", E4M3), at_2=(E4M3, E4M3, E4M3))


def step(model):
    model(X).square().mean().backward()


def expected(forward, backward):
    return {
        "0/output": forward,
        "0/grad_weight": backward,
        "2/output": forward,
        "2/grad_input": backward,
        "2/grad_weight": backward,
    }


def test_every_gemm_that_ran_is_counted_by_its_site(model):
    assert fp8_runs(model) == expected(0, 0)
    for _ in range(3):
        step(model)
    with torch.no_grad():
        model(X)
    assert fp8_runs(model) == expected(4, 3)
    copied = copy.deepcopy(model)
    step(copied)
    assert (fp8_runs(copied), fp8_runs(model)) == (expected(5, 4), expected(4, 3))
    reset_health(model)
    assert fp8_runs(model) == expected(0, 0)


def test_counts_go_on_where_a_checkpoint_left_them(model):
    fresh = copy.deepcopy(model)
    for _ in range(2):
        step(model)
    saved = copy.deepcopy(fp8_state_dict(model))
    step(fresh)
    load_fp8_state_dict(fresh, saved)
    assert fp8_runs(fresh) == expected(2, 2)
    reset_health(fresh)
    carry_over(saved, fresh)
    assert fp8_runs(fresh) == expected(2, 2)
    load_fp8_state_dict(fresh, {**saved, "scales": []})  # as in a checkpoint of before
    assert fp8_runs(fresh) == expected(2, 2)


def test_other_sites_are_refused_or_begin_anew(model):
    step(model)
    saved, other = copy.deepcopy(fp8_state_dict(model)), made(at_2=(E4M3, E4M3, "hp"))
    with pytest.raises(ValueError, match="other FP8 sites run now than when it was saved: 0"):
        load_fp8_state_dict(other, saved)
    carry_over(saved, other)
    assert fp8_runs(other) == {"2/output": 1, "2/grad_input": 1}
