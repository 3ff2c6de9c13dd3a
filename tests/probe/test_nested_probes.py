import pytest
from models import odd_mlp, train_steps

import loka


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
