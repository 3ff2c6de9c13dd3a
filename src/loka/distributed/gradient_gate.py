"""The gate of eight-bit gradients: a codec is used where its error is a small part of every element's step,
and steps are faster by more than clocks are unsure.

    size   M_i    sum over steps of g_i^2                  g: the mean of the ranks' gradients, by float32
    error  E_i    sum over steps of (ghat_i - g_i)^2       ghat: by the codec
    share         mean over a matrix's elements i of E_i / (E_i + M_i), at most 1 % in every matrix

M is what Adam divides by, so the share is that of the step as Adam takes it, in which elements count alike: a
number that vanishes beside its block's largest counts half, where the relative L2 error of all hides it. Of
gradients that are mostly noise of the choice of rows, as late in training, M is that noise: a step is as
noisy as if it had that share fewer rows. Of mostly signal, it is the relative error of the step, squared.

It is no prediction of NE. It bounds what a codec adds to the steps that were looked at, at the weights as
they were; rounding that goes one way in every step does more over a run than noise of its size. What a codec
does to NE only paired runs show. Times are of whole steps without an update, forward and backward, so what an
engine hides behind other work is hidden here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from loka.core.exceptions import LokaError
from loka.core.exchange import gather_json, ranks_of
from loka.core.records.report import HP
from loka.core.table import format_table
from loka.core.timing import Timing
from loka.distributed.choice import Choice, Timer, compared, is_faster, time_in_turns
from loka.distributed.gradient_codec import FP32, codec_named, scattered_sum
from loka.distributed.gradient_wire import GradientWire, Segments, Sending, agree_on_codecs, hook_gradients
from loka.nn.unwrap import device_of

STEPS = 8  # whose gradients are looked at
MOST_SHARE = 0.01
_WARM_UPS = 2  # in which DDP forms its buckets, and what is compiled compiles


def choose_gradients(
    model: nn.Module,
    step: Callable[[int], object],
    *,
    codecs: Sequence[str] = ("int8", "e4m3"),
    timer: Timer = time_in_turns,
) -> Choice:
    """Whether gradients travel by an eight-bit codec, and by which; from then on they do. A collective.

    Call it after wrapping and before the first step, in place of `send_gradients`. `taken` of the result
    holds the codec, or nothing.

    Args:
        model: in DistributedDataParallel, or with units of `fully_shard` in it.
        step: `step(i)` goes forward and backward as a step of training does, on rows of this rank, others for
            each i of `STEPS`, and updates nothing. It is called about 80 times; gradients are the caller's to
            drop.

    Raises:
        LokaError: one rank alone; gradients of matrices are not finite, or zeros, or none; as
            `send_gradients`.
        UnknownName: `codecs` has a name that is no codec's.
        PlanMismatch: ranks would choose from other codecs, or one cannot; none is hooked.
    """
    wires = {name: GradientWire(scatter=name, gather=name) for name in codecs}
    if ranks_of() == 1:
        raise LokaError("one rank sends no gradients, so nothing can be chosen", way_out="start several by torchrun")
    agree_on_codecs(model, ", ".join(codecs))
    sending = Sending(None)
    hook_gradients(model, sending)
    for number in range(_WARM_UPS):
        step(number)
    sums: dict[tuple[str, Segments], torch.Tensor] = {}
    sending.observe = partial(_add, sums, codecs)
    for number in range(STEPS):
        step(number)
    sending.observe = None
    found = _shares(sums, codecs)
    numbers = iter(range(1 << 30))

    def by(wire: GradientWire | None) -> None:
        sending.wire = wire
        step(next(numbers) % STEPS)

    timed: dict[str, Timing] = {}
    if admitted := [name for name, (share, *_) in found.items() if share <= MOST_SHARE]:
        ways = {HP: partial(by, None), **{name: partial(by, wires[name]) for name in admitted}}
        timed = compared(ways, device_of(model), timer)
    choice = _choice(found, timed).of_the_first()
    sending.wire = wires[choice.taken[0]] if choice.taken else None
    return choice


@torch.no_grad()
def _add(
    sums: dict[tuple[str, Segments], torch.Tensor],
    codecs: Sequence[str],
    key: str,
    sent: torch.Tensor,
    row: Segments,
    group: dist.ProcessGroup,
    both_ways: bool,
) -> None:
    """Adds M and the E of each codec, [1 + codecs, C], of what the ranks send: float32 [ranks, C]."""
    if not sent.shape[1]:  # of vectors alone
        return
    ranks, none = sent.shape[0], sent.new_zeros(sent.shape[0], 0)
    mean = scattered_sum(sent, none, FP32, group)[0] / ranks
    parts = [mean.double().square()]  # of 1e-20 float32 has no square
    for name in codecs:
        codec = codec_named(name)
        found = scattered_sum(sent, none, codec, group)[0] / ranks
        if both_ways:
            found = codec.decode(codec.encode(found[None]))[0]
        parts.append((found - mean).double().square())
    sums[key, row] = sums.get((key, row), 0) + torch.stack(parts)


def _shares(
    sums: dict[tuple[str, Segments], torch.Tensor], codecs: Sequence[str]
) -> dict[str, tuple[float, str, float]]:
    mine: list[tuple[str, list[float]]] = []
    for (_, row), found in sums.items():
        for name, begin, end in row:
            part = found[:, begin:end]
            shares = part / (part + part[0]).clamp_min(torch.finfo(part.dtype).tiny)
            mine.append((name, [*part.sum(1).tolist(), *shares.sum(1).tolist()]))
    every = [one for theirs in gather_json(mine) for one in theirs]
    totals: dict[str, list[float]] = {}
    for name, numbers in every:
        before = totals.get(name, [0.0] * len(numbers))
        totals[name] = [a + b for a, b in zip(before, numbers, strict=True)]
    size = sum(numbers[0] for numbers in totals.values())
    if not (math.isfinite(size) and size > 0):
        raise LokaError(
            "gradients of matrices are not finite, or zeros, or none came, so no codec can be judged",
            way_out="look at the rows and at what `step` goes backward through; --gradients hp asks nothing",
        )
    result = {}
    for index, codec in enumerate(codecs, 1):
        # M / (M + M) is a half for each element that has a gradient.
        half = 1 + len(codecs)
        by_name = {name: n[half + index] / max(2 * n[half], 1) for name, n in totals.items()}
        worst = max(by_name, key=lambda name: (by_name[name], name))
        error = math.sqrt(sum(numbers[index] for numbers in totals.values()) / size)
        result[codec] = (by_name[worst], worst, error)
    return result


def _choice(found: dict[str, tuple[float, str, float]], timed: dict[str, Timing]) -> Choice:
    faster = {name: t.microseconds.value for name, t in timed.items() if name != HP and is_faster(t)}
    best = min(faster, key=lambda name: (faster[name], name), default=None)
    rows = []
    for name, (share, worst, error) in found.items():
        why = "" if name == best else f"slower than {best}" if name in faster else "not faster by time"
        times = ("-", "-")
        if name in timed:
            times = (f"{timed[name].microseconds.value:.0f}", str(timed[name].speedup))
        else:
            why = f"its error is more than {MOST_SHARE:.0%} of a matrix's steps"
        rows.append((name, f"{error:.4f}", f"{share:.2%}", worst, *times, why))
    header = ("codec", "L2 error", "share", "in matrix", "step us", "speedup", "why not")
    how = f"by {best}" if best else "as torch sends them"
    told = f"{format_table(header, rows)}\ngradients travel {how}, by steps and times of {ranks_of()} ranks"
    return Choice(ranks_of(), (best,) if best else (), told)
