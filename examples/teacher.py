"""A large teacher in FP8 labels rows and stores latents; a small student learns from both.

    teacher   a zoo model: trained, probed, planned, frozen; after each window of rows it trains on and is
              refreshed, so that its versions age
    labels    the teacher's probability of each row, made before it trains on that row
    latents   its last hidden layer, stored in e4m3 by the row's pair of ids (`loka.serve.Latents`); a later
              row with that pair reads what an earlier one left
    student   main head on [features, adapter(latent)], by the clicks; auxiliary head on the features, by the
              teacher's labels

    loss = BCE(main, click) + aux_weight BCE(aux, teacher)

Sources: the external teacher and the auxiliary head are ExFM's (arXiv 2502.17494), latents computed ahead are
SOLARIS's (arXiv 2604.12110); docs/teacher.md says what we could check of both, and what is ours.

Arms train on the same rows from the same weights; only what the arm names differs. Every seed is a world, a
teacher and a student of its own. On a CPU eight bits are emulated: the times say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import loka
from loka.core.table import format_table
from loka.data import Batch, SyntheticClicks
from loka.measurement import Settings
from loka.serve import Latents, Server
from loka.serve.rows import digest
from loka.train import TrainConfig, quality
from loka.train.optim import build_optimizers
from loka.validation.paired import paired_difference
from loka.zoo import DLRM, Front, build
from loka.zoo.layers import mlp

USER, ITEM = 0, 1
"""The sparse features whose ids make the key of a latent."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Numbers of rows, and of all else. `history`: what the teacher trains on before there is a student;
    `stream`: what the student trains on, in `windows`; `max_age` of a latent, in rows."""

    seeds: int = 4
    history: int = 81_920
    stream: int = 32_768
    held: int = 24_576
    windows: int = 8
    batch: int = 512
    max_age: int = 32_768
    aux_weight: float = 1.0
    ne: float = 1e-3


@dataclass(frozen=True)
class Arm:
    """Whose labels and latents a student learns from, "fp8", "bf16" or None, and how latents are kept."""

    labels: str | None
    latents: str | None
    kept: str = "e4m3"


PLAIN = "clicks alone"
FULL = "fp8 teacher, e4m3 latents"
ARMS = {
    PLAIN: Arm(None, None),
    "fp8 teacher's labels": Arm("fp8", None),
    FULL: Arm("fp8", "fp8"),
    "bf16 teacher, e4m3 latents": Arm("bf16", "bf16"),
    "fp8 teacher, float32 latents": Arm("fp8", "fp8", kept="float32"),
}


class Exposed(nn.Module):
    """A zoo model that shows its last hidden layer: {"logit": [B], "latent": [B, d]}."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.logit = model.logit
        self.width = model.logit.in_features
        model.logit = nn.Identity()  # what is left returns what the logit read
        self.tower = model

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> dict[str, torch.Tensor]:
        latent = self.tower(dense, sparse)
        return {"logit": self.logit(latent).squeeze(1), "latent": latent}


class Student(nn.Module):
    """Rows, latents [B, d] and whether there is one, `hit` [B], -> main and auxiliary logits [B].

    The auxiliary head is a tower of its own on the shared features: labels of the teacher reach neither the
    main head nor the adapter. The adapter reads latents behind a stop of the gradient, and a row without one
    gets zeros.
    """

    def __init__(self, model: nn.Module, *, latent_width: int, hidden: int = 32) -> None:
        super().__init__()
        exposed = Exposed(model)
        self.shared = exposed.tower
        self.adapter = mlp(latent_width, (hidden,), norm=True)
        self.main = mlp(exposed.width + hidden, (hidden, 1), last_activation=False)
        self.aux = mlp(exposed.width, (hidden, 1), last_activation=False)

    def forward(
        self, dense: torch.Tensor, sparse: torch.Tensor, latents: torch.Tensor, hit: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.shared(dense, sparse)
        told = self.adapter(latents.detach()) * hit.unsqueeze(1)
        main = self.main(torch.cat([features, told], dim=1))
        return main.squeeze(1), self.aux(features).squeeze(1)


@dataclass(frozen=True)
class Labelled:
    """Rows, and what each teacher made of them: `told["fp8"]["logit"]` [B], `["latent"]` [B, d]."""

    rows: Batch
    told: dict[str, dict[str, torch.Tensor]]


@dataclass
class Stores:
    """What each teacher left: e4m3 by `Latents`, and the FP8 teacher's in float32 for the comparison."""

    low: dict[str, Latents]
    exact: dict[int, torch.Tensor] = field(default_factory=dict)

    def write(self, window: Sequence[Labelled], *, version: int, now: int) -> None:
        ids = torch.cat([pairs(part.rows) for part in window])
        for name, store in self.low.items():
            latents = torch.cat([part.told[name]["latent"] for part in window])
            fresh = Latents.of(ids, latents, teacher=store.teacher, version=version, written=now)
            self.low[name] = store.merged(fresh)
            if name == "fp8":
                self.exact.update(zip(ids.tolist(), latents.unbind(), strict=True))

    def read(self, arm: Arm, rows: Batch, *, now: int, max_age: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [B, d], zeros where there is none, and whether there is one, float32 [B]."""
        ids = pairs(rows)
        found = self.low[arm.latents or "fp8"].look_up(ids, now=now, max_age=max_age)
        if arm.latents is None:
            return torch.zeros_like(found.values), torch.zeros(len(ids))
        if arm.kept == "float32":
            for place in found.hit.nonzero()[:, 0].tolist():
                found.values[place] = self.exact[int(ids[place])]
        return found.values, found.hit.float()


@dataclass(frozen=True)
class Outcome:
    """Of one seed: `logits` of each arm and of the FP8 `teacher` on held-out rows.

    `rates`: rows a second that each teacher labels. `hits`, `stale`: shares of held-out rows that found a
    latent, and one that was too old. Of hits: `age` in rows, and how many `versions` the teacher is ahead.
    """

    logits: dict[str, torch.Tensor]
    teacher: torch.Tensor
    labels: torch.Tensor
    rates: dict[str, float]
    hits: float
    stale: float
    age: float
    versions: float
    store_bytes: int
    float_bytes: int
    fp8_sites: int


def pairs(rows: Batch) -> torch.Tensor:
    """The key of each row's latent [B]: one number for a user and an item."""
    return rows.sparse[:, USER] * (1 << 32) + rows.sparse[:, ITEM]


def batches(seed: int, first: int, rows: int, size: int) -> Iterator[Batch]:
    """Rows [first, first + rows) of world `seed`."""
    return SyntheticClicks(rows=rows, seed=seed, first_row=first).batches(size)


def train_teacher(
    teacher: Exposed, rows: Iterable[Batch], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    teacher.train()
    for batch in rows:
        logits = teacher(batch.dense, batch.sparse)["logit"]
        step(binary_cross_entropy_with_logits(logits, batch.label), optimizers)


def step(loss: torch.Tensor, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def loss_of(main: torch.Tensor, aux: torch.Tensor, part: Labelled, arm: Arm, weight: float) -> torch.Tensor:
    """The clicks for the main head; the teacher's probabilities for the auxiliary one, if the arm has it."""
    loss = binary_cross_entropy_with_logits(main, part.rows.label)
    if arm.labels is None:
        return loss
    told = part.told[arm.labels]["logit"].sigmoid()
    return loss + weight * binary_cross_entropy_with_logits(aux, told)


def freeze(
    teacher: Exposed, seed: int, settings: Sizes, optimizers: Sequence[torch.optim.Optimizer]
) -> Server:
    """Trains the teacher on the history, the last sixteenth of it probed, and freezes it by the plan."""
    tail = settings.history // 16 // settings.batch * settings.batch
    train_teacher(teacher, batches(seed, 0, settings.history - tail, settings.batch), optimizers)
    with loka.Probe(teacher, every=2, logits=lambda answer: answer["logit"]) as probe:
        train_teacher(teacher, batches(seed, settings.history - tail, tail, settings.batch), optimizers)
    candidates, coarse = ("emulated:rowwise_e4m3",), Settings(max_draws=4)
    report = loka.measure(probe.stats(), device="cpu", candidates=candidates, settings=coarse)
    plan = loka.plan(report, loka.Budget(ne=settings.ne))
    rows = batches(seed, settings.history - tail, tail, settings.batch)
    calibration = [(batch.dense, batch.sparse) for batch in rows]
    return loka.serve.freeze(teacher, plan, calibration=calibration, name=f"history of world {seed}")


@torch.no_grad()
def label(
    rows: Iterable[Batch], server: Server, teacher: Exposed, seconds: dict[str, float]
) -> list[Labelled]:
    """What the FP8 server and the same weights in bf16 make of rows; adds up the time of each."""
    teacher.eval()
    window = []
    for batch in rows:
        told, began = {}, time.perf_counter()
        told["fp8"] = server((batch.dense, batch.sparse)).output
        between = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            told["bf16"] = {name: out.float() for name, out in teacher(batch.dense, batch.sparse).items()}
        seconds["fp8"] += between - began
        seconds["bf16"] += time.perf_counter() - between
        window.append(Labelled(batch, told))
    return window


def run_seed(seed: int, settings: Sizes) -> Outcome:
    """A world, its teacher, and a student of each arm."""
    torch.manual_seed(seed)
    world = SyntheticClicks(rows=1, seed=seed)
    config = TrainConfig(batch_size=settings.batch)
    teacher = Exposed(build("wukong", dense_features=world.dense_features, vocab_sizes=world.vocab_sizes))
    optimizers = list(build_optimizers(teacher, config).values())
    server = freeze(teacher, seed, settings, optimizers)

    lineage = digest([list(teacher.state_dict().values())])  # latents of other weights are others
    empty = Latents.of(
        torch.empty(0, dtype=torch.int64),
        torch.empty(0, teacher.width),
        teacher=lineage,
        version=0,
        written=0,
    )
    stores = Stores({"fp8": empty, "bf16": empty})
    students, learn = {}, {}
    for name in ARMS:
        torch.manual_seed(seed)
        front = Front(dense_features=world.dense_features, vocab_sizes=world.vocab_sizes, dim=8, bottom=(32,))
        students[name] = Student(DLRM(front, top=(64, 32)), latent_width=teacher.width)
        learn[name] = list(build_optimizers(students[name], config).values())

    window_rows, seconds = settings.stream // settings.windows, {"fp8": 0.0, "bf16": 0.0}
    for window in range(settings.windows):
        first = settings.history + window * window_rows
        labelled = label(batches(seed, first, window_rows, settings.batch), server, teacher, seconds)
        for place, part in enumerate(labelled):
            now = window * window_rows + place * settings.batch
            for name, arm in ARMS.items():
                told = stores.read(arm, part.rows, now=now, max_age=settings.max_age)
                main, aux = students[name](part.rows.dense, part.rows.sparse, *told)
                step(loss_of(main, aux, part, arm, settings.aux_weight), learn[name])
        stores.write(labelled, version=server.version, now=(window + 1) * window_rows)
        train_teacher(teacher, (part.rows for part in labelled), optimizers)
        server.refresh(teacher.state_dict())
    labelled_rows = settings.windows * window_rows
    rates = {name: labelled_rows / spent for name, spent in seconds.items()}
    return held_out(seed, settings, students, stores, server, rates)


@torch.no_grad()
def held_out(
    seed: int,
    settings: Sizes,
    students: dict[str, Student],
    stores: Stores,
    server: Server,
    rates: dict[str, float],
) -> Outcome:
    """What the students predict of later rows, from the store as the stream left it, without a teacher."""
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in students}
    labels, founds, answers = [], [], []
    now = settings.stream // settings.windows * settings.windows
    for rows in batches(seed, settings.history + now, settings.held, settings.batch):
        founds.append(stores.low["fp8"].look_up(pairs(rows), now=now, max_age=settings.max_age))
        for name, student in students.items():
            told = stores.read(ARMS[name], rows, now=now, max_age=settings.max_age)
            logits[name].append(student.eval()(rows.dense, rows.sparse, *told)[0])
        answers.append(server((rows.dense, rows.sparse)).output["logit"])
        labels.append(rows.label)
        now += len(rows)
    hit, stale = (torch.cat([getattr(found, name) for found in founds]) for name in ("hit", "stale"))
    age, version = (torch.cat([getattr(found, name) for found in founds])[hit] for name in ("age", "version"))
    store = stores.low["fp8"]
    return Outcome(
        logits={name: torch.cat(parts) for name, parts in logits.items()},
        teacher=torch.cat(answers),
        labels=torch.cat(labels),
        rates=rates,
        hits=float(hit.double().mean()),
        stale=float(stale.double().mean()),
        age=float(age.double().mean()),
        versions=float((server.version - version).double().mean()),
        store_bytes=store.bytes,
        float_bytes=store.bytes + 3 * store.low.nbytes - store.scale.nbytes,
        fp8_sites=len(server.card.sites),
    )


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds, and its standard error; nan of one seed."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return statistics.fmean(values), error


def ne_percent(outcomes: Sequence[Outcome], base: str, arm: str) -> tuple[float, float]:
    """NE of `arm` minus that of `base`, in percent of it, paired by seed: mean and standard error."""
    found = [paired_difference(one.logits[base], one.logits[arm], one.labels) for one in outcomes]
    return mean_and_error([difference.ne_percent.value for difference in found])


def report(outcomes: Sequence[Outcome]) -> str:
    """The table of docs/teacher.md."""

    def over(values: Iterable[float], form: str) -> str:
        return "{0:{form}} +- {1:.1g}".format(*mean_and_error(list(values)), form=form)

    def against(base: str, arm: str) -> str:
        return "{:+.3f} % +- {:.3f}".format(*ne_percent(outcomes, base, arm))

    rows = []
    for arm in ARMS:
        ne = over((quality(one.logits[arm], one.labels).ne for one in outcomes), ".4f")
        rows.append(
            (arm, ne, "" if arm == PLAIN else against(PLAIN, arm), "" if arm == FULL else against(arm, FULL))
        )
    ne = over((quality(one.teacher, one.labels).ne for one in outcomes), ".4f")
    rows.append(("(the teacher itself)", ne, "", ""))
    first = outcomes[0]
    lines = [
        format_table(("student learns from", "NE", "against clicks alone", f"{FULL!r} against it"), rows),
        f"mean +- standard error over {len(outcomes)} seeds, {len(first.labels)} held-out rows each",
        *(
            f"{name} teacher labels {over((one.rates[name] for one in outcomes), '.0f')} rows/s here"
            for name in first.rates
        ),
        f"hits {over((one.hits for one in outcomes), '.3f')}, too old "
        f"{over((one.stale for one in outcomes), '.3f')} of held-out rows",
        f"a hit is {over((one.age for one in outcomes), '.0f')} rows and "
        f"{over((one.versions for one in outcomes), '.2f')} versions of the teacher old",
        f"store: {first.store_bytes} bytes; with float32 latents {first.float_bytes}; "
        f"{first.fp8_sites} FP8 sites in the teacher",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[Outcome]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for option in fields(Sizes):
        parser.add_argument(
            f"--{option.name.replace('_', '-')}", type=type(option.default), default=option.default
        )
    settings = Sizes(**vars(parser.parse_args(arguments)))
    outcomes = [run_seed(seed, settings) for seed in range(settings.seeds)]
    print(report(outcomes))
    return outcomes


if __name__ == "__main__":
    main()
