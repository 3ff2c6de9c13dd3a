import torch
from torch import nn

import loka


def test_effects_are_refused_where_a_weight_is_gone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 1))
    layer = model[2]
    kept = layer.weight.detach().clone()
    storage = layer.weight.untyped_storage()

    def gather(*_):
        storage.resize_(kept.nbytes)
        layer.weight.data.copy_(kept)

    def free(*_):
        storage.resize_(0)

    layer.register_forward_pre_hook(gather)
    with loka.Probe(model, every=1) as probe:
        layer.register_forward_hook(free)
        model(torch.randn(20, 13))
    told = {layer.no_effect for layer in probe.stats().layers.values()}
    assert told == {"the weight of 2 was freed after its call, as a wrapper that shards does"}
