"""A zoo model without its tables: what is left to compute once the rows are looked up.

    dense [B, D], rows [B, F, dim] -> logits [B]        rows[b, f] = table_f[id_bf]

With a history, its rows [B, L, dim] take the place of its ids in the same way.

Tables live elsewhere in large systems (TorchRec, FBGEMM), have sparse gradients, and cannot be
captured in a CUDA graph; the rest can. The rows' gradient is what goes back to the tables.
"""

import copy

import torch
from torch import nn

from loka.zoo.layers import Front


class LookedUp(nn.Module):
    """Stands where the tables were: rows [B, F, dim] or [B, L, dim] pass as they are."""

    def forward(self, rows: torch.Tensor, column: int | None = None) -> torch.Tensor:
        if not rows.is_floating_point():
            raise ValueError("the dense part is called with rows, not ids; look_up(model, ...) gives them")
        return rows


def dense_part(model: nn.Module) -> nn.Module:
    """The same class with the same submodules and names, called with rows in place of ids.

    Parameters are shared, not copied: training one trains the other, and the state dict is that
    of `model` less `front.embeddings`. Only the model and its front are new objects: a child
    replaced in one of the two later, such as `logit`, is not replaced in the other. So mods and
    plans go on one of them, before or after.

    To never allocate the tables, build the model with tables of one row:

        dense_part(build("dcnv2", size="mlperf", dense_features=13, vocab_sizes=(1,) * 26))

    Raises ValueError for a model without the zoo's `front`.
    """
    front = _front(model)
    # What is in a memo is not copied: deepcopy takes these as they are.
    shared = [*model.children(), *front.children(), *model.parameters(), *model.buffers()]
    memo: dict[int, object] = {id(part): part for part in shared if part is not front}
    part, part_front = _twin(model, memo), _twin(front, memo)
    vars(part_front)["_modules"]["embeddings"] = LookedUp()
    vars(part)["_modules"]["front"] = part_front
    return part


def _twin(module: nn.Module, memo: dict[int, object]) -> nn.Module:
    """Another object of the same class and state, hooks included. FSDP2's modules refuse copy and deepcopy."""
    twin: nn.Module = object.__new__(type(module))
    memo[id(module)] = twin  # a forward of FP8 sites refers to its module
    torchs = {name: value for name, value in vars(module).items() if name.startswith("_")}
    own = {name: value for name, value in vars(module).items() if name not in torchs}
    vars(twin).update(torchs, **copy.deepcopy(own, memo), _modules=dict(module._modules))
    return twin


def look_up(model: nn.Module, sparse: torch.Tensor, sequence: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """The rows of ids [B, F], and of a history's [B, L], as `dense_part(model)` takes them in their places.

    Padding is looked up as well; the model leaves it out by its lengths. A history that the model does not
    read is passed on as it is. Raises ValueError for a model without the zoo's `front`.
    """
    front = _front(model)
    rows = front.embeddings(sparse)
    if sequence is None:
        return (rows,)
    return rows, sequence if front.history is None else front.embeddings(sequence, front.history)


def _front(model: nn.Module) -> Front:
    front = getattr(model, "front", None)
    if not isinstance(front, Front):
        raise ValueError(f"{type(model).__name__} has no `front` of the zoo, so its tables are not known")
    return front
