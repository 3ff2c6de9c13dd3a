"""Checks that a model scores each row by itself: the rows of a request are padded, split and sliced."""

from collections.abc import Sequence

import torch
from torch import nn

from loka.core.exceptions import ServeRefused
from loka.serve.rows import Form, leaves, pad
from loka.serve.run import Runner
from loka.serve.sites import answering
from loka.serve.watch.agreement import LEAST_DB, as_real, finite_in_both

_COMPARED = 128  # rows that tell how large answers are
_ALONE = 16  # of these are answered by few at a time: one tells little of what is rounding
_FEW = 0.5
"""Of integers and booleans."""
_LITTLE = 2.0**-5
"""Of the root mean square of a place of a row, for half of the rows: four units of bf16, by which models may round."""


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same entries, with NaN equal to NaN."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def check_sizes(
    tree: nn.Module,
    precise: nn.Module,
    run: Runner,
    form: Form,
    batches: Sequence[Sequence[torch.Tensor]],
    buckets: Sequence[int],
) -> None:
    """Raises ServeRefused where a bucket's outputs lack its rows, as of a `squeeze()` that takes a batch of one
    off: a request's rows are cut out of them. And where the fewest rows that are padded to it, in high precision, have
    other answers by themselves."""
    most = max(len(batches[0][0]), _COMPARED)
    batch = [torch.cat(column)[:most] for column in zip(*batches, strict=True)]
    several = [list(leaf.shape) for leaf in leaves(run(tree, pad([t[:2] for t in batch], 3, form)))]
    plain = [leaf.clone() for leaf in leaves(run(precise, [tensor.clone() for tensor in batch]))]
    for least, rows in zip([1, *(rows + 1 for rows in buckets)], buckets, strict=False):
        with answering(rows):
            answer = run(tree, pad([tensor[:rows] for tensor in batch], rows, form))
        for leaf, (_, *sides) in zip(leaves(answer), several, strict=True):
            if list(leaf.shape) != [rows, *sides]:
                raise ServeRefused(
                    f"an output {list(leaf.shape)} for {rows} rows, where 3 give {[3, *sides]}",
                    why=["a request is padded, and its rows are cut out of each output"],
                    way_out=f"keep the side of rows, as squeeze(-1) does, or freeze without {rows} in buckets",
                )
        if least < rows and _depends(precise, run, form, batch, plain, least, rows):
            raise ServeRefused(
                f"this model answers {least} rows by other numbers among {rows}",
                why=["a request is padded to the next bucket, and forward asks how many rows there are"],
                way_out="let its answers not depend on that, or have a bucket for each number of rows",
            )


def _depends(
    precise: nn.Module,
    run: Runner,
    form: Form,
    batch: Sequence[torch.Tensor],
    plain: Sequence[torch.Tensor],
    least: int,
    rows: int,
) -> bool:
    """Whether the first `least` of `batch`, and those behind them up to `_ALONE`, are answered otherwise where they are
    padded to `rows`. `plain`: the answers to `batch`."""
    begins = range(0, min(_ALONE, len(batch[0])), least)
    some = [pad([tensor[begin : begin + least] for tensor in batch], least, form) for begin in begins]
    alone, padded = (
        [[_first(least, leaf) for leaf in leaves(run(precise, pad(each, count, form)))] for each in some]
        for count in (least, rows)
    )
    for one, other, like in zip(zip(*padded, strict=True), zip(*alone, strict=True), plain, strict=True):
        if one[0].shape == other[0].shape and _moved(torch.cat(one), torch.cat(other), like):
            return True
    return False


def _first(rows: int, leaf: torch.Tensor) -> torch.Tensor:
    return leaf[:rows].clone() if leaf.dim() else leaf.clone()  # a `squeeze()` takes the side of one row off


def _moved(one: torch.Tensor, other: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether answers to the same rows differ by more than rounding. Rounding changes few integers and booleans, and of
    numbers it moves a few by much, as of other experts, or all by little. `like` holds the answers to many rows, since
    an answer to a few rows may be near zero.
    """
    one, other, like = map(as_real, (one, other, like))
    if not other.is_floating_point():
        return bool((one != other).double().mean() > _FEW)
    if not torch.equal(one.isfinite(), other.isfinite()):
        return True
    a, b = finite_in_both(one, other)
    signal, _ = finite_in_both(like, like)
    if len(a) > 0 and float((a - b).square().mean()) > 10 ** (-LEAST_DB / 10) * float(signal.square().mean()):
        return True
    apart, finite = (one.double() - other.double()).abs(), like.double().where(like.isfinite(), torch.nan)
    return bool((apart.nanmedian(dim=0).values > _LITTLE * finite.square().nanmean(dim=0).sqrt()).any())


def check_independent(
    tree: nn.Module, precise: nn.Module, run: Runner, batches: Sequence[Sequence[torch.Tensor]]
) -> None:
    """Raises ServeRefused where other rows beside them change the answers to rows, or where the place or the number of
    rows does.

    At the same place, and among as many rows, the same kernels run, so the bits must be the same. Otherwise the answers
    in high precision must agree.
    """
    whole = [torch.cat(column) for column in zip(*batches, strict=True)]
    differs = torch.stack([(c != c[:1])[:, None].flatten(1).any(1) for c in whole]).any(0)
    differs[0] = True  # and the rows that differ from it: among equal rows another order would show nothing
    picked = differs.nonzero()[:_COMPARED, 0]
    batch, count = [column[picked] for column in whole], len(picked)
    _check_neighbours(tree, run, batch)
    other = [column.flip(0) for column in batch]
    beside = [torch.cat([a, b, b[-1:]]) for a, b in zip(batch, other, strict=True)]
    among = [torch.cat([torch.stack([b, a], 1).flatten(0, 1), b, b]) for a, b in zip(batch, other, strict=True)]
    for plain, moved in zip(*(_answers(precise, run, rows) for rows in (beside, among)), strict=True):
        if _moved(moved[1 : 2 * count : 2], plain[:count], plain[:count]):
            raise _refusal(tree, run, beside)


def _check_neighbours(tree: nn.Module, run: Runner, batch: Sequence[torch.Tensor]) -> None:
    """Each half of `batch` among copies of itself, and with the other half before and behind it. Copies alone show
    nothing of the largest number in a batch, for one. Each row is there twice or more: an expert that runs for a single
    row adds up otherwise."""
    count = len(batch[0])
    halves = [column[: count // 2] for column in batch], [column[count // 2 :] for column in batch]
    for own, others in (halves, halves[::-1]):
        copies = [column[torch.arange(count, device=column.device) % len(column)] for column in own]
        alone = [torch.cat([c, a, c]) for a, c in zip(own, copies, strict=True)]
        beside = [torch.cat([b, a, a, a, b]) for a, b in zip(own, others, strict=True)]
        rows, places = len(beside[0]), slice(count, count + len(own[0]))
        for first, second in zip(*(_answers(tree, run, each) for each in (alone, beside)), strict=True):
            if first.dim() == 0 or first.shape[0] != rows:
                raise ServeRefused(
                    f"an output {list(first.shape)} for {rows} rows",
                    why=["a request is padded, and its rows are cut out of each output"],
                    way_out="return outputs [B, ...] alone, and reduce them outside",
                )
            if not alike(first[places], second[places]):
                raise _refusal(tree, run, beside)


def _answers(tree: nn.Module, run: Runner, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copied: the next call may write over them, as this one may over its inputs."""
    return [leaf.clone() for leaf in leaves(run(tree, [each.clone() for each in rows]))]


def _refusal(tree: nn.Module, run: Runner, rows: Sequence[torch.Tensor]) -> ServeRefused:
    if not all(map(alike, _answers(tree, run, rows), _answers(tree, run, rows))):
        return ServeRefused(
            "this model answers the same rows by other numbers each time",
            why=["it draws random numbers, counts its calls, or sums in any order"],
            way_out="in eval it must not: F.dropout takes training=self.training, for one",
        )
    return ServeRefused(
        "this model mixes rows: other rows beside them, their place or their number change the answers",
        way_out="serve the part of it that scores rows by themselves",
    )
