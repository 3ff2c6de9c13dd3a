"""The FLOPs of one forward pass by aten's own operations: all, and those of GEMMs with a parameter.

It is an oracle for LoKA's account and shares nothing with it. A TorchDispatchMode sees every operation below
autograd and counts 2MNK for each matrix product. An operand is a parameter if it is one, a view of one (it
lies in the parameter's memory), or a copy of one: cast, cloned, made contiguous, concatenated with other
parameters. A weight that is computed (by a product of parameters, a mask, a norm) is none.

Trade-off: memory is told by its address, so every copy of a parameter is kept until counting ends.
"""

import re
from collections import Counter
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .products import PRODUCTS

COPIES = (
    "_to_copy", "clone", "slice_copy", "select_copy", "view_copy", "t_copy", "transpose_copy", "permute_copy",
    "constant_pad_nd", "cat", "stack",
)  # fmt: skip
# What reads a matrix of parameters and multiplies no matrices; pointwise operations have a tag.
NO_PRODUCTS = (
    "embedding", "_embedding_bag", "_embedding_bag_forward_only", "index", "index_select", "gather", "detach",
    "_unsafe_view", "_weight_norm_interface", "sum", "mean", "linalg_vector_norm", "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
)  # fmt: skip
PRODUCT_BY_NAME = re.compile(r"(?<!a)mm|matmul|linear|conv|attention|transformer|rnn|lstm|gru")


@dataclass(frozen=True)
class Flops:
    """`by_parameter` adds up to `with_parameter`.

    Names are those of `named_parameters`, the first one if tied. Where several parameters make one operand or
    both operands, their names are joined by `+`.
    """

    total: int
    with_parameter: int
    by_parameter: dict[str, int]
    without_parameter: dict[str, int]  # by operation
    unaccounted: dict[str, int]  # operations that may multiply and are not known here, with their calls


def count_flops(model, run):
    """Count what `run` does: one forward of the eager, unsharded model.

    Of a backward, GEMMs are counted too; those of attention and convolutions land in `unaccounted`.
    """
    counting = Counting(model)
    with counting:
        run()
    by_parameter = dict(counting.by_parameter)
    without = dict(counting.without_parameter)
    owned = sum(by_parameter.values())
    return Flops(owned + sum(without.values()), owned, by_parameter, without, dict(counting.unaccounted))


class Counting(TorchDispatchMode):
    def __init__(self, model):
        super().__init__()
        self.by_parameter = Counter()
        self.without_parameter = Counter()
        self.unaccounted = Counter()
        self.memory = Memory(model)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name not in PRODUCTS:
            with self:  # in inference mode nothing has taken composite operations apart yet
                taken_apart = func.decompose(*args, **kwargs)
            if taken_apart is not NotImplemented:
                return taken_apart
        out = func(*args, **kwargs)
        if func.namespace == "aten":
            self.record(name, func, args, kwargs, out)
        return out

    def record(self, name, func, args, kwargs, out):
        if name in PRODUCTS:
            for flops, operands in PRODUCTS[name](out, *args, **kwargs):
                self.add(name, flops, [owner for x in operands for owner in self.memory.owners(x)])
        elif name in COPIES:
            self.memory.copied(out, args)
        elif name == "copy_":
            self.memory.copied(args[0], args[1:])
        elif func._schema.is_mutable:
            self.memory.copied(args[0], ())  # what was a copy is now computed
        elif not func.is_view and name not in NO_PRODUCTS and self._may_multiply(name, func, args):
            self.unaccounted[name] += 1

    def add(self, name, flops, owners):
        if owners:
            self.by_parameter["+".join(dict.fromkeys(owners))] += flops
        else:
            self.without_parameter[name] += flops

    def _may_multiply(self, name, func, args):
        reads_matrix = any(x.dim() > 1 and any(self.memory.owners(x)) for x in _tensors(args))
        return bool(PRODUCT_BY_NAME.search(name)) or (reads_matrix and torch.Tag.pointwise not in func.tags)


class Memory:
    """Which bytes hold which parameters, or copies of them."""

    def __init__(self, model):
        self._parameters = {}
        self._copies = {}
        self._kept = []  # so that no address is used again
        for name, parameter in model.named_parameters():
            self._parameters.setdefault(_address(parameter), []).append((_bytes(parameter), (name,)))

    def copied(self, tensor, sources):
        if not isinstance(tensor, torch.Tensor) or _address(tensor) in self._parameters:
            return
        owners = [tuple(self.owners(x)) for x in _tensors(sources)]
        if owners and all(owners):
            self._copies[_address(tensor)] = tuple(dict.fromkeys(name for names in owners for name in names))
            self._kept.append(tensor.detach())
        else:
            self._copies.pop(_address(tensor), None)

    def owners(self, tensor):
        if tensor.is_nested or not tensor.numel():
            return
        yield from self._copies.get(_address(tensor), ())
        read = _bytes(tensor)
        for held, names in self._parameters.get(_address(tensor), ()):
            if held.start < read.stop and read.start < held.stop:
                yield from names


def _address(tensor):
    return 0 if tensor.is_nested else tensor.untyped_storage().data_ptr()


def _bytes(tensor):
    """From the first byte to behind the last one, within the storage."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset()
    return range(start * tensor.element_size(), (start + span) * tensor.element_size())


def _tensors(tree):
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
