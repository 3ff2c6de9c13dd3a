"""freeze: from a model, a plan and calibration rows to a server. The model stays as it was.

Calibration rows serve three purposes. They give static scales to the recipes that need one: the largest |x| times two,
which costs nothing but the smallest magnitudes, since FP8 is floating point. They give the alarm its ranges. And they
give the errors on the card. Recipes with a scale for a row, or for a part of a row, keep computing their scales from
each request: see serve/sites.py.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from loka.core.device import fingerprint, no_autocast
from loka.core.error import decibels
from loka.core.exceptions import LokaError, ServeRefused
from loka.core.numerics.reference import scale_of
from loka.core.problem import dtype_name
from loka.core.recipe import Gemm
from loka.core.records.plan import Plan
from loka.nn.unwrap import class_name, device_of
from loka.planner.convert import check
from loka.serve.build import droppable, frozen_tree, record_weights, relinked, share, skeleton_of, watch
from loka.serve.by_rows import buckets_by_site, by_rows, check_plans, in_fp8
from loka.serve.card import Calibration, Card, SiteCard
from loka.serve.graphs import wants_graphs
from loka.serve.model.independence import alike, check_independent, check_sizes
from loka.serve.model.private import check_apart, kinds_of, own_copy, tried, written_attributes
from loka.serve.race import fastest
from loka.serve.rows import MOST_DRAWN, Request, digest, form_of, leaves, mapped
from loka.serve.run import Runner
from loka.serve.server import Server
from loka.serve.sites import FrozenSite, FrozenWeight, input_cast, scale_source
from loka.serve.watch.agreement import AnswerError, error_of
from loka.serve.watch.monitor import range_of
from loka.serve.watch.shadow import check_share

BUCKETS = (1, 16, 64, 128, 512, 2048, 4096)
LEAST_ROWS = 32
"""Fewer say nothing of how rows differ, by which the alarm judges."""
HEADROOM = 2.0
"""Of a static scale, over the largest |x| of the calibration rows."""


@torch.inference_mode(False)
@torch.no_grad()
@no_autocast()
def freeze(
    model: nn.Module,
    plan: Plan | Mapping[int, Plan],
    *,
    calibration: Iterable[Request],
    name: str = "unnamed",
    autocast: torch.dtype | None = None,
    buckets: Sequence[int] = BUCKETS,
    shadow: float = 0.0,
    graphs: bool | None = None,
    race: bool = False,
) -> Server:
    """A server of `model` by `plan`, with FP8 weights that are quantized once.

    In eval its answers are those of the converted model bit for bit, where input scales are current: run
    eagerly, or under torch.compile where there are graphs. The model is copied and stays as it is, converted
    or not.

    Args:
        model: on the device to serve from. Its inputs are tensors [B, ...], a row's outputs depend on that
            row alone, and outputs are tensors [B, ...] in any tuples, lists and dicts.
        plan: one, or several by the most rows that each is for, such as {128: small, 4096: large}; a bucket
            takes the one for the fewest rows that are not less than its own.
        calibration: requests, `LEAST_ROWS` rows or more in all, of the traffic to serve.
        name: of the calibration rows, for the card.
        autocast: requests run under torch.autocast of this dtype; None for none.
        buckets: numbers of rows that the model is run with: a request is padded to the next one, and a
            longer one is split.
        shadow: share of requests that are answered in high precision too, in [0, 1]. Above 0 the weights in
            high precision stay in memory.
        graphs: whether it is compiled, and answers by one CUDA graph for each bucket; None where the model is
            on CUDA and its forward writes to no attribute.
        race: each bucket's graph is compiled and timed by every plan given, and in high precision, and takes
            the fastest (serve/race.py). High-precision weights stay in memory for buckets that choose them.

    Raises:
        PlanMismatch, NoKernelFits, WrongResults: as `loka.convert` does; WrongResults, too, where compiled
            code computes something else.
        ServeRefused: rows that are too few, all alike, not finite or zero at a site; a model that mixes rows,
            writes to its inputs, is sharded, cannot be copied, holds views of weights, reads the original's in its
            copy, or fails for these rows or for rows drawn between their bounds; buckets or graphs that cannot be.
    """
    if not isinstance(name, str):
        raise ServeRefused(f"name={name!r} is no text", way_out='what the calibration rows are, as "clicks of Monday"')
    _check_buckets(buckets)
    check_share(shadow)
    check_plans(plan)
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ServeRefused(f"autocast={autocast!r} casts nothing", way_out="torch.bfloat16, torch.float16, or None")
    batches = _requests(calibration)
    precise = own_copy(model)
    for each in [plan] if isinstance(plan, Plan) else plan.values():
        check(precise, each, (Gemm.OUTPUT,))
    planned = by_rows(plan, buckets)
    plan = planned.plan
    fp8 = in_fp8(plan)
    sources = {path: scale_source(candidate) for path, candidate in fp8.items()}
    if not fp8:
        raise ServeRefused(
            "this plan runs no `output` GEMM in FP8, so there is nothing to freeze",
            way_out="serve the model as it is, or plan with another budget",
        )
    device = device_of(precise)
    form = form_of(batches[0])
    rows = [batch for batch in (form.read(given, device) for given in batches) if batch[0].shape[0]]
    _check_rows(rows)
    form = form.bounded(rows)
    content = digest(rows)
    skeleton = skeleton_of(precise)
    run = Runner(form=form, autocast=autocast)
    found = tried(
        lambda: _calibrate(precise, plan, rows, run),
        f"this model fails for calibration rows of the form {form}",
        "let each request hold what forward takes and nothing else, such as labels: a tuple by place, a dict by "
        "keyword (where forward takes one dict, give a subclass whose forward takes its keys: "
        "`def forward(self, **rows)`)",
    )
    if digest(rows) != content:
        raise ServeRefused("this model's forward writes to its inputs", way_out="let it write to a copy, `x.clone()`")
    # After calibration, so that attributes which forward only makes in its first call do not count.
    scratch = written_attributes(precise, lambda: run(precise, rows[0]))
    check_apart(model, lambda: run(precise, rows[0]))
    graphs = wants_graphs(graphs, device, scratch)
    weights = _weights(precise, skeleton, plan, run, form.check_rows(device, MOST_DRAWN), joined=graphs)
    weights = _reached(weights, found)
    scales = found.scales(fp8)
    plain = _run_all(precise, rows, run)
    _check_outputs(plain[0])
    _errors(precise, plan, rows, run, found, weights, scales)
    chosen = planned.in_hp
    if race:
        chosen = fastest(precise, plan, weights, scales, chosen, run, buckets, graphs=graphs)
    in_hp = buckets_by_site(buckets, chosen)
    call = partial(_run_all, batches=rows, run=run)
    tree, given, dropped, kept = _frozen(precise, plan, weights, scales, in_hp, call)
    answers = _answer_errors(given, plain)

    def check_alone() -> None:
        check_independent(tree, precise, run, rows)
        check_sizes(tree, precise, run, form, rows, buckets)

    tried(
        check_alone,
        "this model fails for calibration rows in another order, or for other numbers of them",
        "a request may have any number of rows, and is padded to a bucket: let forward take them, in eval, under "
        "autocast= and without gradients",
    )
    read = {path: found.card(path, fp8[path], sources[path], weights[path], scales) for path in fp8 if path in weights}
    card = Card(
        model=class_name(model),
        modules=kinds_of(precise),
        machine=fingerprint(device),
        loka=_version(),
        calibration=Calibration(
            name=name, batches=len(rows), rows=sum(batch[0].shape[0] for batch in rows), sha256=content
        ),
        form=form,
        autocast=None if autocast is None else dtype_name(autocast),
        buckets=tuple(buckets),
        in_hp=chosen,
        sites=read,
        unreached=tuple(path for path in fp8 if path not in weights),
        answers=answers,
        dropped=tuple(dropped),
        kept=tuple(kept),
        scratch=tuple(scratch),
        dense_bytes=(
            sum(weight.bytes for weight in weights.values()),
            sum(2 * weight.sides[0] * weight.sides[1] for weight in weights.values()),
        ),
    )
    return Server(
        card=card,
        plan=plan,
        skeleton=skeleton,
        scales=scales,
        module=tree,
        precise=precise if shadow else None,
        shadow=shadow,
        graphs=graphs,
        device=device,
        written=None,
    )


def _weights(
    precise: nn.Module, skeleton: nn.Module, plan: Plan, run: Runner, rows: list[torch.Tensor], *, joined: bool
) -> dict[str, FrozenWeight]:
    """The weights of the FP8 sites, found as each refresh finds them: in a tree that new weights were put into."""

    def call(tree: nn.Module) -> None:
        if any(leaf.is_meta for leaf in leaves(run(tree, rows))):
            raise NotImplementedError("it reads a weight that the new ones did not replace")

    tried(
        lambda: call(precise),
        "this model fails for rows whose numbers are drawn one by one between those of the calibration rows",
        "refresh finds weights by them, and load tells models apart: let forward take any number that it may be given",
    )
    found: dict[str, FrozenWeight] = tried(
        lambda: record_weights(relinked(skeleton, precise), plan, call, joined=joined),
        "this model fails once other weights are put into its state dict's places",
        "read weights in forward by the names that they have there, as self.weight, and keep them in no list",
    )
    return found


def _check_buckets(buckets: Sequence[int]) -> None:
    numbers = isinstance(buckets, Sequence) and all(type(rows) is int for rows in buckets)
    if not numbers or not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
        raise ServeRefused(f"buckets {buckets} are not rising numbers of rows", way_out=f"such as {BUCKETS}")


def _version() -> str:
    import loka

    return loka.__version__


def _too_few(rows: int) -> ServeRefused:
    return ServeRefused(
        f"{rows} calibration rows; {LEAST_ROWS} or more are needed",
        why=["the alarm judges by how rows differ, and static scales by the largest value"],
        way_out="give batches of the traffic that will be served, a few thousand rows",
    )


def _requests(calibration: Iterable[Request]) -> list[Request]:
    """Raises ServeRefused for a single request in the place of several, and for none."""
    if isinstance(calibration, (torch.Tensor, Mapping)):
        raise ServeRefused("calibration is one request", way_out="give a list of requests, such as [rows]")
    found = list(calibration) if isinstance(calibration, Iterable) else []
    if not found:
        raise _too_few(0)
    return found


def _check_rows(batches: Sequence[Sequence[torch.Tensor]]) -> None:
    count = sum(batch[0].shape[0] for batch in batches)
    if count < LEAST_ROWS:
        raise _too_few(count)
    first = [column[:1] for column in next(batch for batch in batches if batch[0].shape[0])]
    if all(bool((column == one).all()) for batch in batches for column, one in zip(batch, first, strict=True)):
        raise ServeRefused(
            f"all {count} calibration rows are alike", way_out="give rows of the traffic that will be served"
        )


def _check_outputs(answer: Any) -> None:
    low = [place for place, leaf in enumerate(leaves(answer)) if leaf.is_floating_point() and leaf.itemsize == 1]
    if low:
        raise ServeRefused(
            f"outputs {', '.join(map(str, low))} are in FP8, and torch does not tell which of them are finite",
            way_out="return them in bfloat16, and cast answers",
        )


@dataclass
class _Found:
    """By site, of the calibration rows: row maxima of the input, and energies of the output and of its error."""

    peaks: dict[str, torch.Tensor] = field(default_factory=dict)
    signal: dict[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)

    def scales(self, fp8: dict[str, str]) -> dict[str, torch.Tensor]:
        """The static scales, float32 [1]."""
        return {
            path: scale_of(peaks.amax().reshape(1) * HEADROOM, input_cast(fp8[path]))
            for path, peaks in self.peaks.items()
            if scale_source(fp8[path]) == "static"
        }

    def card(
        self, path: str, candidate: str, source: str, weight: FrozenWeight, scales: dict[str, torch.Tensor]
    ) -> SiteCard:
        ceiling = float(scales[path]) * input_cast(candidate).format.max if path in scales else None
        return SiteCard(
            candidate=candidate,
            sides=weight.sides,
            dtype=dtype_name(weight.dtype),
            scale=source,
            even=weight.even is not None,
            sqnr_db=decibels(self.noise[path], self.signal[path]),
            range=range_of(self.peaks[path], ceiling),
        )


def _run_all(tree: nn.Module, batches: Sequence[Sequence[torch.Tensor]], run: Runner) -> list[Any]:
    return [mapped(run(tree, batch), torch.clone) for batch in batches]  # copied: a model may write over its answer


def _reached(weights: dict[str, FrozenWeight], found: _Found) -> dict[str, FrozenWeight]:
    """The weights of the sites that calibration rows reached. Raises ServeRefused where one of these has no weight."""
    lost = [path for path in found.peaks if path not in weights]
    if lost:
        raise ServeRefused(
            "these sites run for calibration rows and not for the rows that refresh finds weights by "
            "(numbers between theirs, drawn one by one)",
            why=lost,
            way_out="plan again with them forced to 'hp'",
        )
    return {path: weight for path, weight in weights.items() if path in found.peaks}


def _calibrate(precise: nn.Module, plan: Plan, batches: Sequence[Sequence[torch.Tensor]], run: Runner) -> _Found:
    """Runs the calibration rows. Raises ServeRefused where the input of a site is not finite, or is
    zero in all rows.
    """
    run(precise, batches[0])  # without sites torch has code of its own, as of nn.TransformerEncoder
    seen: dict[str, list[torch.Tensor]] = {}

    def note(name: str, candidate: str, rows: torch.Tensor, weight: torch.Tensor) -> None:
        seen.setdefault(name, []).append(rows.float().abs().amax(dim=1))

    watch(precise, plan, note, partial(_run_all, batches=batches, run=run))
    peaks = {name: torch.cat(parts) for name, parts in seen.items()}
    bad = [
        f"{name}: {int((~found.isfinite()).sum())} of {found.numel()} rows hold NaN or infinity"
        for name, found in peaks.items()
        if not bool(found.isfinite().all())
    ]
    bad += [f"{name}: zero in all rows" for name, found in peaks.items() if bool((found == 0).all())]
    if bad:
        raise ServeRefused(
            "calibration rows say nothing at these sites",
            why=bad,
            way_out="look at the rows and at the model before the first site; give rows as they are served",
        )
    return _Found(peaks=peaks)


def _errors(
    precise: nn.Module,
    plan: Plan,
    batches: Sequence[Sequence[torch.Tensor]],
    run: Runner,
    found: _Found,
    weights: dict[str, FrozenWeight],
    scales: dict[str, torch.Tensor],
) -> None:
    def note(name: str, candidate: str, rows: torch.Tensor, weight: torch.Tensor) -> None:
        site = FrozenSite(name, candidate, weights[name], scales.get(name))
        exact = rows.double() @ weight.double().t()
        noise = (site.multiply(rows).double() - exact).square().sum().item()
        found.noise[name] = found.noise.get(name, 0.0) + noise
        found.signal[name] = found.signal.get(name, 0.0) + exact.square().sum().item()

    watch(precise, plan, note, partial(_run_all, batches=batches, run=run))


def _frozen(
    precise: nn.Module,
    plan: Plan,
    weights: dict[str, FrozenWeight],
    scales: dict[str, torch.Tensor],
    in_hp: Mapping[str, Collection[int]],
    call: Callable[[nn.Module], list[Any]],
) -> tuple[nn.Module, list[Any], list[str], list[str]]:
    """The frozen tree, its answers, the keys of the weights that it drops, and why it keeps the others."""
    whole = frozen_tree(share(precise), plan, weights, scales, (), in_hp)
    answers = call(whole)
    keys, kept = droppable(whole, weights, in_hp)
    if not keys:
        return whole, answers, keys, kept
    lean = frozen_tree(share(precise), plan, weights, scales, keys, in_hp)
    try:
        same = all(
            got.device == want.device and alike(got, want)
            for got, want in zip(leaves(call(lean)), leaves(answers), strict=True)
        )
    except LokaError:
        raise
    except Exception:  # whatever torch says of a model that computes with a weight that is not there
        same = False
    if same:
        return lean, answers, keys, kept
    return whole, answers, [], [*kept, "all others (the model reads weights outside of its sites too)"]


def _answer_errors(answers: Sequence[Any], plain: Sequence[Any]) -> tuple[AnswerError, ...]:
    """The error of each output, over all batches."""
    low, high = (zip(*map(leaves, outputs), strict=True) for outputs in (answers, plain))
    return tuple(
        error_of(*(torch.cat([leaf.flatten() for leaf in column]) for column in pair))
        for pair in zip(low, high, strict=True)
    )
