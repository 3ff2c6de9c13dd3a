"""What the ranks of a run do together, so that none decides for itself or waits for one that is gone.

In a process group of several ranks `train` runs on each, with rows of its own. Gradients are averaged by what
the model is wrapped in (DistributedDataParallel). What else they share goes through here: an answer of each
rank to all, or rank 0's after work that takes longer than a collective may wait. Where one raises, all raise.
Without a process group, or alone in it, all of this is what the one rank does.
"""

import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from loka.core.exceptions import DataRefused, LokaError, first_line, truncated
from loka.core.exchange import gather_json, rank_of, ranks_of
from loka.core.storage.alone import alone_in
from loka.core.storage.files import require_writable

T = TypeVar("T")

_PAUSE = 0.1  # seconds between two looks for rank 0's answer
_MOST_TOLD = 12  # differences between ranks that an error lists
_numbers = itertools.count()  # of the answers of rank 0, which all ranks wait for in the same order


class RankFailed(LokaError):
    """Another rank raised; this one cannot go on without it."""


def first_rank() -> bool:
    return rank_of() == 0


def together(work: Callable[[], T], say: Callable[[T], str] = str) -> tuple[T, list[str]]:
    """Runs `work` on each rank, and returns its result with what `say` makes of the results of all ranks, by rank. A
    collective.

    Raises:
        RankFailed: `work` raised on another rank. Where it raised on this one, that error is raised.
    """
    if ranks_of() == 1:
        result = work()
        return result, [say(result)]
    try:
        result = work()
        answer = {"said": say(result)}
    except BaseException as error:
        gather_json({"failed": first_line(error)})
        raise
    answers = gather_json(answer)
    failed = [f"rank {rank}: {a['failed']}" for rank, a in enumerate(answers) if "failed" in a]
    if failed:
        raise _left_alone(failed)
    return result, [a["said"] for a in answers]


def all_or_none(work: Callable[[], T]) -> T:
    """What `work` returns, where it raises on no rank. A collective; raises as `together`."""
    return together(work, lambda result: "")[0]


@contextmanager
def alone_together(folder: Path | None, *, saves: bool) -> Iterator[None]:
    """Inside, no other run trains in `folder`, if one is given: rank 0 holds its lock. `saves`: whether the run has
    steps to save there. Raises InUse, NotWritten, RankFailed.
    """

    def hold(folder: Path) -> None:
        held.enter_context(alone_in(folder, "training"))
        if saves:
            require_writable(folder)

    with ExitStack() as held:
        if folder is not None:
            together(lambda: hold(folder) if first_rank() else None)
        yield


def by_the_first(work: Callable[[Callable[[], object]], str], *, idle: Callable[[], None]) -> str:
    """What `work` returns on rank 0, on every rank. Meanwhile the others do nothing but call `idle`.

    They wait at the store that the ranks met at: a collective would run into its timeout, or into NCCL's watchdog.
    `work` is given a function that it calls now and then, which tells the others that it goes on.

    Raises:
        RankFailed: `work` raised on rank 0, where its own error is raised; or rank 0 was silent for as long as the
            process group waits.
    """
    if ranks_of() == 1:
        return work(lambda: None)
    store, number = dist.distributed_c10d._get_default_store(), next(_numbers)
    answer, beat = f"loka/first/{number}", f"loka/first/{number}/alive"
    if dist.get_rank() == 0:
        try:
            said = work(lambda: store.add(beat, 1))
        except BaseException as error:
            store.set(answer, json.dumps({"failed": first_line(error)}))
            raise
        store.set(answer, json.dumps({"said": said}))
        return said
    patience = store.timeout.total_seconds()  # type: ignore[attr-defined]
    heard, since = store.add(beat, 0), time.monotonic()
    while not store.check([answer]):
        idle()
        time.sleep(_PAUSE)
        if (beats := store.add(beat, 0)) != heard:
            heard, since = beats, time.monotonic()
        if (silent := time.monotonic() - since) > patience:
            raise _left_alone([f"rank 0 was not heard of for {silent:.0f} s"])
    found = json.loads(store.get(answer))
    if "failed" in found:
        raise _left_alone([f"rank 0: {found['failed']}"])
    return str(found["said"])


def require_alike_told(fields: Mapping[str, Any], *, way_out: str) -> None:
    """Raises LokaError on all ranks where what they were given differs: JSON values by name. A collective."""
    _, texts = together(lambda: _flat(fields), json.dumps)
    first, *others = map(json.loads, texts)
    differences = [
        f"rank {rank}: {name} is {theirs.get(name)!r}, and {first.get(name)!r} on rank 0"
        for rank, theirs in enumerate(others, 1)
        for name in first | theirs
        if theirs.get(name) != first.get(name)
    ]
    if differences:
        raise LokaError(
            "the ranks train by different configurations, so they would not train one model, or wait for each other",
            why=truncated(differences, _MOST_TOLD),
            way_out=way_out,
        )


def _flat(fields: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """The values of nested fields by names such as "model.class"."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        found |= _flat(value, f"{within}{name}.") if isinstance(value, Mapping) else {f"{within}{name}": value}
    return found


def require_same_steps(what: str) -> None:
    """Raises DataRefused on all ranks where `what`, the steps that a rank is about to take, differs. A collective."""
    _, messages = together(lambda: what)
    if len(set(messages)) > 1:
        raise DataRefused(
            "the ranks would take different numbers of steps or parts of them, or log or save at different ones, and "
            "wait for each other",
            why=[f"rank {rank}: {theirs}" for rank, theirs in enumerate(messages)],
            way_out="give all equally many rows (or set max_rows), one log_every and checkpoint_every, and "
            "all a folder for checkpoints or none",
        )


def require_as_one(weights: Iterable[torch.Tensor], *, saved: bool) -> None:
    """Warns where values differ that all ranks should share: then nobody averages their gradients, or they began apart.

    Raises LokaError instead where the weights are `saved`, because a checkpoint holds one model.
    """
    if ranks_of() == 1:
        return
    replicas = [weight for weight in weights if not hasattr(weight, "placements")]  # DTensors are one for all
    sums = [float(weight.detach().double().sum()) for weight in replicas]
    _, every = together(lambda: [value.hex() for value in sums], json.dumps)
    if len(set(every)) == 1:
        return
    what = "the ranks' weights differ after their first step: each trains a model of its own"
    way_out = (
        "Give train() the model wrapped in torch.nn.parallel.DistributedDataParallel, which begins alike and "
        "averages gradients"
    )
    if saved:
        raise LokaError(what, why=["a checkpoint of several ranks holds one model"], way_out=way_out)
    warnings.warn(f"{what}. {way_out}", RuntimeWarning, stacklevel=3)


def _left_alone(why: list[str]) -> RankFailed:
    return RankFailed(
        "this rank stops because another one cannot go on",
        why=why,
        way_out="see that rank's message; then start all ranks again, which go on from their checkpoints",
    )
