"""A mean of a run's weights as a second model to judge, beside the weights of its last step.

    tail   the mean of the weights over the last `average_share` of the steps   (Izmailov et al., 1803.05407)
    ema    a += (w - a) / n,  n updates in `average_share` of the steps         (Polyak and Juditsky 1992)

torch's AveragedModel keeps it. About a hundred updates fall into that share, so a run pays for a thousand
passes over its weights at most, each of which waits for the device, and for one more copy of them. The mean
holds weights alone: it is judged inside the model itself, which may run in FP8 and may have been converted on
the way.

BatchNorm's running statistics are those of other weights. Where the model has such layers they are estimated
anew from training rows (`update_bn`) and put back afterwards; layers without running statistics, such as
BlockNorm, LayerNorm and RMSNorm, need nothing.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

from loka.core.exceptions import LokaError
from loka.data.batch import Batch, Source
from loka.nn.fp8_state_dict import fp8_state_dict, load_fp8_state_dict
from loka.nn.fsdp_units import reshard
from loka.train.config import Precision, TrainConfig
from loka.train.schedule import steps_of
from loka.train.steps.forward import arguments, predict, tasks_in

_UPDATES = 100
"""In the share of a run that the mean covers: more would not move it, and each reads all weights once."""


Update = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Any], None]


class Weights(nn.Module):
    """The parameters of a model, the same objects, without its modules, hooks and buffers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.all = nn.ParameterList(model.parameters())


def averaged_weights(model: nn.Module, config: TrainConfig, steps: int) -> AveragedModel | None:
    """The mean that `config.average` asks for, still empty; None where it asks for none.

    Raises:
        LokaError: the weights have less than 32 bits, in which a step of a hundredth is lost to rounding.
    """
    if config.average == "none":
        return None
    short = [name for name, weight in model.named_parameters() if weight.dtype.itemsize < 4]
    if short:
        raise LokaError(
            f"a mean of weights in less than 32 bits is rounded away: {', '.join(short[:3])}",
            way_out="float32 weights (bf16 autocasts them as they are used), or average='none'",
        )
    if config.average == "tail":
        return AveragedModel(Weights(model), multi_avg_fn=_kinds_apart(get_swa_multi_avg_fn()))
    span, every = _span(config, steps)
    decay = 1 - 1 / max(span // every, 1)
    return AveragedModel(Weights(model), multi_avg_fn=_kinds_apart(get_ema_multi_avg_fn(decay)))


def due(done: int, steps: int, config: TrainConfig) -> bool:
    """Whether the weights go into the mean after `done` of `steps` updates. Those of the last step always do."""
    span, every = _span(config, steps)
    inside = config.average == "ema" or done > steps - span
    return config.average != "none" and inside and (steps - done) % every == 0


@contextlib.contextmanager
def as_averaged(
    model: nn.Module, average: AveragedModel, *, rows: Source | None = None, config: TrainConfig
) -> Iterator[nn.Module]:
    """Inside, `model` has the mean of its weights. Weights, buffers and the counts of FP8 sites are put back
    afterwards.

    Args:
        rows: training rows, from which the statistics of BatchNorm are estimated anew, in `_UPDATES` batches.

    Raises:
        LokaError: nothing was averaged yet, or the model has BatchNorm and no `rows` are given.
    """
    if not int(average.n_averaged):
        raise LokaError("nothing was averaged yet", way_out="train to the end of the run first")
    normed = any(isinstance(m, _BatchNorm) and m.running_mean is not None for m in model.modules())
    if normed and rows is None:
        raise LokaError(
            "BatchNorm's statistics are those of the weights of the last steps, not of their mean",
            way_out="give as_averaged rows to train on; they are estimated anew from these",
        )
    counts = copy.deepcopy(fp8_state_dict(model))
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()] if normed else []
    _exchange(model, average)
    try:
        if normed and rows is not None:
            _estimate(model, rows, config)
        yield model
    finally:
        _exchange(model, average)
        load_fp8_state_dict(model, counts)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _kinds_apart(update: Update) -> Update:
    """Averages DTensors apart from other tensors, where FSDP2 shards a part of the model: no operator takes both in one
    list.
    """

    @torch.no_grad()
    def each(means: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], count: Any) -> None:
        for sharded in (False, True):
            pairs = [p for p in zip(means, weights, strict=True) if hasattr(p[0], "placements") is sharded]
            if pairs:
                update([mean for mean, _ in pairs], [weight for _, weight in pairs], count)

    return each


def _span(config: TrainConfig, steps: int) -> tuple[int, int]:
    """Steps that the mean covers, and steps between two of its updates."""
    span = max(steps_of(config.average_share, steps), 1)
    return span, max(span // _UPDATES, 1)


@torch.no_grad()
def _exchange(model: nn.Module, average: AveragedModel) -> None:
    """Exchanges the weights in place, one tensor at a time: memory need not hold a second copy of large tables."""
    reshard(model)  # a forward without backward leaves FSDP2's root gathered
    for weight, mean in zip(model.parameters(), average.module.parameters(), strict=True):
        kept = weight.detach().clone()
        weight.copy_(mean)
        mean.copy_(kept)


def _estimate(model: nn.Module, rows: Source, config: TrainConfig) -> None:
    training = [(module, module.training) for module in model.modules()]
    batches = itertools.islice(rows.batches(config.batch_size), _UPDATES)
    update_bn((batch.to(config.device) for batch in batches), _ByBatch(model, config.precision))
    for module, mode in training:
        module.training = mode


class _ByBatch(nn.Module):
    """Takes a whole batch, as `update_bn` calls a model with one argument."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.model, self.precision = model, precision

    def forward(self, batch: Batch) -> torch.Tensor:
        return predict(self.model, arguments(batch), self.precision, tasks=tasks_in(batch))
