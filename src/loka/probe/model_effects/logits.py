"""The logits in what a model returns, or why there are none: for the extra backward of
probe/model_effects/sensitivity.py.

    z = output,    or  z = logit(output) where the graph behind the output begins at sigmoids

A tensor of one column is taken as it is; in a dict or an object, what is called "logits" is; of TorchRec's
DLRMTrain, which returns (loss, (loss, logits, labels)) detached, those that its loss was computed from.
Nothing but the graph tells logits from probabilities: a view, a stack or a cast of sigmoids shows them
still. What is between 0 and 1 throughout and shows none is refused, never guessed. So are several columns:
a hidden layer of four cannot be told from four logits.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _global_backward_hooks, _global_backward_pre_hooks

from loka.nn.fsdp_units import comes_and_goes
from loka.probe.trace import unseen

Logits = Callable[[Any], torch.Tensor]
"""What the model returns -> logits [B] or [B, T]."""

# Nodes of autograd that leave values as they are, or bound them.
_MOVES = frozenset(
    (
        *("View", "UnsafeView", "ReshapeAlias", "Alias", "Squeeze", "Unsqueeze", "Stack", "Cat", "ToCopy"),
        *("Clone", "T", "Transpose", "Permute", "Select", "Slice", "Index", "IndexSelect", "Split"),
        *("SplitWithSizes", "Unbind", "Expand", "AsStrided", "Clamp", "ClampMin", "ClampMax"),
    )
)
# Nodes through which a log-probability or a loss of a row stays one. A difference of two may be a logit.
_SUMS = _MOVES | {"Gather", "Neg", "Sum", "Mean", "Mul", "Div", "Add"}
_NO_LOGITS = frozenset(
    ("LogSoftmax", "LogSigmoid", "NllLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "MseLoss")
)


class NoEffect(Exception):
    """Why the effect of a site, or of all, is not known; it ends up in the record."""


def logits_of(output: Any, logits: Logits | None, *, shown: bool = False) -> torch.Tensor:
    """Logits [B, T] in float32 of what a model returned; raises NoEffect where there are none.

    `shown`: whether outputs of the model showed logits before, as probabilities never do.
    """
    output = called_logits(output) if logits is None else logits(output)
    way_out = "; pass logits= to Probe, or base_rate= for the gradient of training"
    if not isinstance(output, torch.Tensor) or not output.is_floating_point() or output.is_nested:
        raise NoEffect(f"the model returns {type(output).__name__}, not logits{way_out}")
    columns = math.prod(output.shape[1:])
    if output.ndim == 2 and columns > 1 and logits is None:
        raise NoEffect(
            f"the model returns {tuple(output.shape)}, which may be {columns} tasks, classes or features: "
            "pass logits= to Probe (lambda o: o if all columns are logits of tasks)"
        )
    if output.ndim not in (1, 2) or (logits is None and columns != 1):
        raise NoEffect(
            f"the model returns {tuple(output.shape)}, not logits of clicks [rows] or [rows, tasks]{way_out}"
            "; a model that predicts no clicks has no KL/H: plan with ne=None"
        )
    if not output.requires_grad:
        raise NoEffect("the model's output has no gradient")
    z = output.float()
    if logits is None and (made_of := _origins(output, _SUMS) - {""}) and made_of <= _NO_LOGITS:
        raise NoEffect(
            f"the model returns {', '.join(sorted(made_of))} of something, no logits of clicks: it has no "
            "KL/H; plan with ne=None, or pass logits= to Probe for the logits of clicks"
        )
    if logits is None and _are_probabilities(output, shown):
        z = z.clamp(1e-6, 1 - 1e-6).logit()
    return z.reshape(z.shape[0], -1)


def called_logits(output: Any) -> Any:
    """What the output itself names its logits, else the output."""
    if isinstance(output, torch.Tensor):
        return output
    named = getattr(output, "logits", None)  # a method of distributions, say, is none
    if named is None and isinstance(output, Mapping):
        named = output.get("logits")
    if isinstance(named, torch.Tensor):
        return named
    match output:
        case (torch.Tensor(ndim=0) as loss, (torch.Tensor(ndim=0), torch.Tensor(ndim=1) as z, torch.Tensor())):
            return _behind(loss, z)
    return output


def _behind(loss: torch.Tensor, detached: torch.Tensor) -> torch.Tensor:
    """The logits that the loss of DLRMTrain was computed from: those that it returns have no graph."""
    if detached.requires_grad:
        return detached
    with unseen():
        given = getattr(loss.grad_fn, "_saved_self", None)  # of binary_cross_entropy_with_logits
    if isinstance(given, torch.Tensor) and given.shape == detached.shape and torch.equal(given, detached):
        return given
    raise NoEffect(
        "the model returns a loss and logits without a graph, and the loss is not their cross-entropy: pass "
        "base_rate= to Probe for the gradient of training"
    )


def _are_probabilities(output: torch.Tensor, shown: bool) -> bool:
    """Whether all of it came out of a sigmoid; raises NoEffect where that is likely, and not seen."""
    origins = _origins(output, _MOVES)
    if "Sigmoid" in origins and len(origins) > 1:
        raise NoEffect("some outputs come out of a sigmoid and some do not: pass logits= to Probe")
    values = output.detach()
    values = values[values.isfinite()]
    within = len(output) > 1 and values.numel() and values.min() >= 0 and values.max() <= 1
    if within and "Sigmoid" not in origins:
        if not values.any():
            raise NoEffect(
                "all outputs are 0, as those of a head that starts at zero: nothing reaches it yet; a later "
                "sampled step tells, once it has moved"
            )
        if not shown:
            raise NoEffect(
                "all outputs lie between 0 and 1, as probabilities do: pass logits= to Probe (lambda o: o if "
                "they are logits)"
            )
    return "Sigmoid" in origins


def _origins(output: torch.Tensor, through: frozenset[str]) -> set[str]:
    """Names of the nodes of autograd that lie behind those `through` which values go; "" of a constant."""
    origins: set[str] = set()
    with unseen():  # another probe takes those who read a node for those who put hooks on one
        nodes, seen = [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        name = node.name().split("Backward")[0] if node is not None else ""
        if name not in through:
            origins.add(name)
        elif node is not None and node not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
    return origins


def finite(picks: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Those whose logits are: one row of NaN says nothing of the rest."""
    picks = picks[z.detach()[picks.to(z.device)].isfinite().all(dim=1).to(picks.device)]
    if not len(picks):
        raise NoEffect("no sample that was picked has finite logits")
    return picks


def refuse(model: nn.Module) -> None:
    """Raises NoEffect where an extra backward through `model` would do more than that."""
    if _global_backward_hooks or _global_backward_pre_hooks:
        raise NoEffect("all modules have backward hooks, which an extra backward would call")
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise NoEffect(f"{path or 'the model'} has backward hooks, which an extra backward would call")
        if type(module).__name__ == "FullyShardedDataParallel" or comes_and_goes(module):
            raise NoEffect("sharded weights (FSDP) come and go with each backward")
