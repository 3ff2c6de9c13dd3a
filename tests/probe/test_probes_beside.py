import copy
import pickle

import pytest
import torch
from models import odd_mlp, train_steps
from torch.optim.swa_utils import AveragedModel

import loka
from loka.probe import renew_effects


@pytest.mark.parametrize("inside", [lambda model: model, lambda model: model[3]])
def test_a_probe_counts_nothing_of_what_another_one_computes(inside):
    """The products of the other's statistics, and of its extra backward, were the model's that are no site: 8.5 % of
    the FLOPs were sites by the inner probe, 64.5 % by the outer one."""
    model = odd_mlp()
    with loka.Probe(model, every=1) as alone:
        train_steps(model, 1)
    with loka.Probe(model, every=1) as outer, loka.Probe(inside(model), every=1) as inner:
        train_steps(model, 1)
    with loka.Probe(inside(model), every=1) as later:
        train_steps(model, 1)
    with loka.Probe(model, every=1, resume=outer.stats()), loka.Probe(inside(model), every=1) as while_open:
        train_steps(model, 1)
    assert outer.stats().coverage == alone.stats().coverage
    assert inner.stats().coverage == while_open.stats().coverage == later.stats().coverage


def test_renewed_effects_are_no_steps_of_a_probe_that_is_open():
    """Their passes counted as steps, their rows as those that a GEMM is timed with, and as rows of training."""
    model = odd_mlp()
    fresh = torch.randn(2, 300, 13)
    with loka.Probe(model, every=1) as probe:
        train_steps(model, 2)
        before = probe.stats()
        renew_effects(model, before, fresh)
        assert probe.next_step()
        renew_effects(model, before, fresh)
        assert probe.stats().layers == before.layers
        train_steps(model, 1)
    assert (probe.stats().steps, probe.stats().sampled_steps) == (3, 3)
    assert probe.stats().layers["0"].rows == before.layers["0"].rows < 300


COPIES = {"deepcopy": copy.deepcopy, "AveragedModel": AveragedModel, "pickle": lambda m: pickle.loads(pickle.dumps(m))}


@pytest.mark.parametrize("made", COPIES)
def test_a_copy_of_a_model_with_an_open_probe_has_none(made, tmp_path):
    """It had a probe of its own that nobody could close, and with save_to an error of Python's ended the training."""
    model = odd_mlp()
    with loka.Probe(model, every=1, save_to=tmp_path) as probe:
        train_steps(model, 1)
        other = COPIES[made](model)
        other(torch.randn(300, 13)).sum().backward()
        with loka.Probe(other, every=1) as own:
            train_steps(other, 3)
    assert (probe.stats().steps, own.stats().steps) == (1, 3)
    assert probe.stats().layers["0"].rows < 300
