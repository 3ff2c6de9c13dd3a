from collections.abc import Mapping

from torch import nn

from loka.graph.attach import attach
from loka.nn import signature


def convert_layer(linear, candidates):
    holder = nn.ModuleDict({"it": linear})
    attach(holder, signature(holder).layers, {"it": candidates})
    return linear


def convert_layers(model, candidates):
    """Makes linear layers of `model` sites: all of them alike, or those that are named."""
    layers = signature(model).layers
    chosen = candidates if isinstance(candidates, Mapping) else dict.fromkeys(layers, candidates)
    attach(model, layers, chosen)
