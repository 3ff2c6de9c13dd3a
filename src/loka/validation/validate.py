"""Is FP8 harmless here? Paired runs: the same seed, rows and order, only the precision differs.

Each pair trains the control and every arm from the same initial weights and evaluates them on the same
held-out rows. Three intervals come of it: of a pair, over rows (validation/paired.py); over pairs, on these
rows; and over both (validation/variance.py), which the verdict goes by (validation/verdicts.py).

The number of pairs has to be settled before one looks: each further look at growing data is another
chance, of 2.5 % at most, to pass with an effect that sits on the limit. `sequential` looks after every pair,
at levels that hold over all looks together (validation/sequential.py), and stops where every arm is decided.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from loka.core.exceptions import FileRefused, LokaError
from loka.core.progress import Track, untracked
from loka.data.batch import Source
from loka.train.config import TrainConfig
from loka.train.labels import require_both
from loka.train.metrics import Floats, checked, log_losses
from loka.validation.annealed import Annealed, annealed
from loka.validation.arms import NUDGED, ArmSpec, key_of
from loka.validation.pair_bank import Bank, expected_of
from loka.validation.paired import NE_LIMIT_PERCENT, PairedDifference, paired_difference
from loka.validation.record import ArmVerdict, SeedPair, Validation
from loka.validation.runs import Bench, Progress, Run, has_run, held_out, run, setting_of, world_of
from loka.validation.segments import Division, Segmented, clusters_of, divide
from loka.validation.sequential import look_tail
from loka.validation.variance import MIN_PAIRS, Expected, by_kl, pair_variances
from loka.validation.verdicts import ERROR, RowsVerdict

BY_MEAN = "all rows, by the mean of the weights"


def validate(
    build: Callable[[], nn.Module],
    rows: Source,
    held_out_rows: Source,
    arms: Sequence[ArmSpec],
    *,
    config: TrainConfig,
    out: Path | str,
    model: str = "model",
    pairs: int = MIN_PAIRS,
    divisions: Sequence[Division] = (),
    cluster: int | None = None,
    limit: float = NE_LIMIT_PERCENT,
    segment_limit: float | None = None,
    sequential: bool = False,
    bank: Bank | None = None,
    identity: Mapping[str, Any] | None = None,
    context: Mapping[str, Any] | None = None,
    track: Track = untracked,
    on_start: Callable[[str], None] | None = None,
    on_log: Progress | None = None,
    on_pair: Callable[[Validation], None] | None = None,
) -> Validation:
    """Trains `pairs` pairs of the control and each of `arms`, and decides whether they differ in NE.

    Where rows have several labels every arm has a verdict for each task, and passes if it passes at all of
    them. The error of 5 % is then shared by the tasks (Bonferroni).

    A killed validation goes on where it was when called again with the same arguments; `pairs` may grow
    and arms may be added. The record is written to `out`/validation.json after every pair.

    Args:
        build: makes the model in high precision; it is called with torch's seed set.
        rows, held_out_rows: to train on, and to evaluate on.
        arms: what to compare with the control (validation/arms.py).
        config: of all runs. Its `precision` is the control's; seeds are its `seed` and the next ones.
        divisions: of the held-out rows into segments, each with a verdict of its own.
        cluster: the sparse feature, such as the user, whose rows come together; None: rows are independent.
        limit, segment_limit: in percent of NE; a segment's is `limit` unless given.
        sequential: `pairs` are the most, and it stops after any from MIN_PAIRS on that decides every arm.
        bank: earlier pairs, which tell what spread to expect between these (validation/variance.py). It is
            asked before the first MIN_PAIRS pairs of `out`, and what it said then holds for all that follow.
        identity: JSON values that tell this model from another that `build` might make.
        context: JSON values for readers of the record.
        on_start: receives the digest of model, rows and configuration before anything is trained.
        on_log: receives each run's name and log lines; `on_pair` the verdict so far.

    Raises:
        ValueError: no pairs, no arms, or a limit that is not positive.
        PlanMismatch, NoKernelFits, WrongResults: an arm cannot run on this model, or on this machine.
        LokaError: two arms have one name, `out` holds another validation or one that was looked at by other
            rules, the control ends in NaN, or runs of two seeds are one.
        DataRefused: all held-out labels of a task are equal.
    """
    segment_limit = limit if segment_limit is None else segment_limit
    control = config.precision
    _check_asked(control, arms, pairs, (limit, segment_limit), sequential=sequential)
    planned = pairs if sequential else None
    before = _same_looks(Path(out), planned)
    bench = Bench(
        build=build,
        train=rows,
        test=held_out_rows,
        config=config,
        out=Path(out),
        identity={"name": model, **(identity or {})},
        track=track,
        on_log=on_log,
    )
    _check_arms(bench, arms, range(config.seed, config.seed + pairs))
    require_both(held_out_rows, batch_size=config.batch_size, what="the held-out rows")
    base = ArmSpec(name=control, apply=lambda model: None, identity={})
    segments = divide(held_out_rows, divisions, batch_size=config.batch_size)
    clusters = None
    if cluster is not None:
        clusters = clusters_of(held_out_rows, cluster, batch_size=config.batch_size)
    seeds = tuple(range(config.seed, config.seed + pairs))
    expected = before.expected if before else _expected(bank or Bank(), bench, seeds)
    rules = _Rules(control, segments, clusters, limit, segment_limit, planned, expected)
    if on_start:
        on_start(world_of(bench))
    runs: list[Run] = []
    done: Validation | None = None
    for place in range(pairs):
        runs += _train_pair(bench, base, arms, seeds, place)
        done = Validation(
            model=model,
            control=control,
            limit=limit,
            segment_limit=segment_limit,
            seeds=seeds[: place + 1],
            arms=tuple(_verdicts(bench, rules, arms, runs, done)),
            runs=tuple(runs),
            context=dict(context or {}),
            planned=planned,
            world=world_of(bench),
            setting=setting_of(bench),
            expected=expected,
            annealed=_annealed(bench, control, seeds[: place + 1][:MIN_PAIRS], runs[0].final_rate),
        )
        done.save(bench.out / "validation.json")
        if on_pair:
            on_pair(done)
        if sequential and place + 1 >= MIN_PAIRS and all(arm.verdict != "undecided" for arm in done.arms):
            break
    assert done is not None
    return done


@dataclass(frozen=True)
class _Rules:
    """How verdicts are made, the same for all arms.

    Attributes:
        clusters: of each held-out row [N] that of which it comes; None: rows are independent.
        limit, segment_limit: in percent of NE.
        planned: the most pairs of a sequential validation; None: it looks once.
        expected: by task, the spread between pairs that is to be expected.
    """

    control: str
    segments: Sequence[Segmented]
    clusters: npt.NDArray[np.int64] | None
    limit: float
    segment_limit: float
    planned: int | None
    expected: Mapping[str, Expected]

    def tail(self, tail: float, pairs: int) -> float:
        """The error of a look after so many pairs, where all looks together may have `tail`."""
        return tail if self.planned is None else look_tail(pairs, self.planned, tail)


def _train_pair(bench: Bench, base: ArmSpec, arms: Sequence[ArmSpec], seeds: Sequence[int], place: int) -> list[Run]:
    """Trains `base`, the control, and `arms` with the seed at `place`, or reads back the runs that did.

    Raises LokaError where the control ends in NaN, and at the second seed where it gives the first one's model.
    """
    seed, runs = seeds[place], list[Run]()
    for arm in (base, *arms):
        finished = run(bench, arm, seed)
        if finished[0].broke and arm is base:
            raise LokaError(
                f"the control {base.name} ends in NaN with seed {seed}",
                why=finished[0].broke.splitlines()[:1],
                way_out="a lower learning rate, or TrainConfig(grad_clip=...)",
            )
        if arm is base and place == 1:
            _require_two(bench, base.name, seeds)
        runs += finished
    return runs


def _verdicts(
    bench: Bench, rules: _Rules, arms: Sequence[ArmSpec], runs: Sequence[Run], before: Validation | None
) -> list[ArmVerdict]:
    """A verdict for each arm and task by all pairs so far; `before`, by the pairs but the last, keeps differences."""
    known = {(arm.name, arm.task): arm.differences for arm in before.arms} if before else {}
    return [
        replace(
            _arm_verdict(bench, rules, arm.name, task, runs, known.get((arm.name, task), {})),
            key=key_of(arm, task),
            unjudged=tuple(name for name in arm.limited if not any(name in part.names for part in rules.segments)),
        )
        for arm in arms
        for task in bench.tasks
    ]


def _check_asked(
    control: str, arms: Sequence[ArmSpec], pairs: int, limits: tuple[float, float], *, sequential: bool
) -> None:
    """Raises ValueError, or LokaError for arms of one name, for a validation that cannot be."""
    names = [control, *(arm.name for arm in arms)]
    if pairs < 1 or not arms:
        raise ValueError(f"{pairs} pairs of {len(arms)} arms are nothing to validate")
    if len(set(names)) < len(names):
        raise LokaError(f"arms of one name: {', '.join(names)}", way_out="rename one, such as its plan file")
    if not all(each > 0 for each in limits):
        raise ValueError(f"limits of {limits[0]} and {limits[1]} %: nothing can lie inside them")
    if sequential and pairs < MIN_PAIRS:
        raise ValueError(f"{pairs} pairs: looks begin after {MIN_PAIRS}, which sequential needs at least")


def _check_arms(bench: Bench, arms: Sequence[ArmSpec], seeds: Sequence[int]) -> None:
    """Before the control trains: an arm that cannot run on this model would say so only then. Not of arms whose runs
    are all there, which another machine may read."""
    checks = [
        arm.check
        for arm in arms
        if arm.check is not None and not all(has_run(bench.out, arm.name, seed) for seed in seeds)
    ]
    if not checks:
        return
    torch.manual_seed(bench.config.seed)
    model = bench.build().to(bench.config.device)
    for check in checks:
        check(model)


def _require_two(bench: Bench, control: str, seeds: Sequence[int]) -> None:
    """Pairs that are copies would count as many, and their spread would be nothing."""
    first, second = (held_out(bench.out, control, seed).logits for seed in seeds[:2])
    if np.array_equal(first, second, equal_nan=True):
        raise LokaError(
            f"seeds {seeds[0]} and {seeds[1]} give one model: the control's predictions are the same to the bit",
            why=["rows come in one order, so that pairs differ by the weights that `build` draws"],
            way_out="let `build` draw weights, or move those that it loads, by torch's generator, seeded for it",
        )


def _expected(bank: Bank, bench: Bench, seeds: Sequence[int]) -> dict[str, Expected]:
    of = partial(expected_of, bank, world=world_of(bench), setting=setting_of(bench), seeds=seeds)
    found = {task: of(task=task) for task in bench.tasks}
    return {task: one for task, one in found.items() if one is not None}


def _same_looks(out: Path, planned: int | None) -> Validation | None:
    """What `out` holds, where it was decided already.

    Raises LokaError where its pairs were looked at by other rules: their looks would not count.
    """
    try:
        before = Validation.load(out / "validation.json")
    except FileRefused:
        return None
    if len(before.seeds) < MIN_PAIRS:
        return None
    if before.planned == planned:
        return before

    def said(pairs: int | None) -> str:
        return "one look" if pairs is None else f"a look after every pair, {pairs} at most"

    raise LokaError(
        f"{out} holds {len(before.seeds)} pairs that were decided by {said(before.planned)}",
        why=[f"now it is {said(planned)}: a level holds only over looks that were planned together"],
        way_out="go on as it was begun, or choose another folder",
    )


def _annealed(bench: Bench, control: str, seeds: Sequence[int], rate: float) -> Annealed:
    """Of the task whose weights rest least: they are one model's."""
    runs = [held_out(bench.out, control, seed).by_task(bench.tasks) for seed in seeds]
    found = [annealed(rate, [run[task] for run in runs]) for task in bench.tasks]
    return max(found, key=lambda one: (one.annealed is False, abs(one.gain.value) if one.gain else 0.0))


def _arm_verdict(
    bench: Bench, rules: _Rules, arm: str, task: str, runs: Sequence[Run], known: Mapping[int, PairedDifference]
) -> ArmVerdict:
    """The verdict of one arm at one task, on all rows and on each segment, by all pairs so far.

    `known`: by seed, differences that were computed before.
    """
    mine = [run for run in runs if run.arm == arm and run.task == task]
    broken = [run for run in mine if run.broke]
    seeds = [run.seed for run in mine if not run.broke]
    differences = dict(known)
    labels: npt.NDArray[np.float32] = np.zeros(0, np.float32)
    losses: list[_PairLosses] = []
    by_mean: list[_PairLosses] = []
    for seed in seeds:
        before, after = (held_out(bench.out, which, seed).by_task(bench.tasks)[task] for which in (rules.control, arm))
        labels = before.labels
        if seed not in differences:
            differences[seed] = paired_difference(before.logits, after.logits, labels)
        losses.append((_losses(before.logits, labels), _losses(after.logits, labels)))
        if before.mean_logits is not None and after.mean_logits is not None:
            by_mean.append((_losses(before.mean_logits, labels), _losses(after.mean_logits, labels)))
    broke = f"seed {broken[0].seed}: {broken[0].broke.splitlines()[0]}" if broken else ""
    pairs = tuple(SeedPair(seed=seed, difference=found) for seed, found in differences.items())
    if not seeds:
        return ArmVerdict(name=arm, task=task, pairs=pairs, average=None, broke=broke)
    error = ERROR / len(bench.tasks)
    several = sum(len(part.names) for part in rules.segments)

    everything = Segmented(("all rows",), np.zeros(len(labels), np.int64))
    of_mean = replace(everything, names=(BY_MEAN,))
    average = _rows_verdicts(everything, losses, labels, rules, rules.limit, error)[0]
    # An A/A arm scatters less than those that a bank knows.
    banked = None if arm == NUDGED else rules.expected.get(task)
    expected = banked or by_kl(differences.values())
    readings: list[RowsVerdict] = []
    if len(by_mean) == len(seeds):
        readings = _rows_verdicts(of_mean, by_mean, labels, rules, rules.limit, error)
    return ArmVerdict(
        name=arm,
        task=task,
        pairs=pairs,
        average=replace(average, variance=replace(average.variance, expected=expected)),
        segments=tuple(
            verdict
            for part in rules.segments
            for verdict in _rows_verdicts(part, losses, labels, rules, rules.segment_limit, error / several)
        ),
        broke=broke,
        readings=tuple(readings),
    )


_PairLosses = tuple[Floats, Floats]
"""Of a pair, the control's and the arm's loss of each held-out row, both [N]."""


def _rows_verdicts(
    part: Segmented,
    losses: Sequence[_PairLosses],
    labels: npt.NDArray[np.float32],
    rules: _Rules,
    limit: float,
    tail: float,
) -> list[RowsVerdict]:
    """A verdict for each group of rows in `part`. `tail`: the error that each may have, over all looks."""
    found = pair_variances(losses, part.group, len(part.names), clusters=rules.clusters)
    tail = rules.tail(tail, len(losses))
    clicks = np.bincount(part.group, weights=labels, minlength=len(part.names))
    return [
        RowsVerdict(name=name, variance=variance, clicks=int(count), limit=limit, tail=tail)
        for name, variance, count in zip(part.names, found, clicks, strict=True)
    ]


def _losses(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]) -> Floats:
    return log_losses(*checked(logits, labels))
