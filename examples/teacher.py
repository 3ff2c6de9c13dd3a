"""A large teacher in FP8 labels rows and stores latents; a small student learns from both.

    teacher   a zoo model, trained, probed, planned and frozen; refreshed after each window of rows
    latents   its last hidden layer in e4m3 by a row's first two ids; a later row with them reads it
    student   loss = BCE(main(features, adapter(latent)), click) + BCE(aux(features), teacher)

The teacher outside and the auxiliary head are ExFM's (arXiv 2502.17494), latents ahead of time SOLARIS's
(arXiv 2604.12110); docs/teacher.md says what of both we could check, and what is ours. Arms see the same
rows from the same weights; a seed is a world, a teacher and students of its own.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import loka
from loka.core.error import estimate_mean
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


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Rows that the teacher sees alone (`history`), students in `windows` (`stream`), that judge (`held`);
    `max_age` of a latent in rows; the teacher's name in the zoo."""

    seeds: int = 4
    history: int = 81_920
    stream: int = 32_768
    held: int = 24_576
    windows: int = 8
    batch: int = 512
    max_age: int = 24_576
    teacher: str = "wukong:small"
    device: str = "cpu"

    def batches(self, seed: int, first: int, rows: int, size: int | None = None) -> Iterator[Batch]:
        """Rows [first, first + rows) of world `seed`."""
        for batch in SyntheticClicks(rows=rows, seed=seed, first_row=first).batches(size or self.batch):
            yield batch.to(self.device)


@dataclass(frozen=True)
class Arm:
    """Whose labels and latents a student learns from, and how latents are kept."""

    teacher: str | None = "fp8"
    latents: str | None = "e4m3"


PLAIN, FULL = "clicks alone", "fp8 teacher, e4m3 latents"
ARMS = {
    PLAIN: Arm(None, None),
    "fp8 teacher's labels": Arm(latents=None),
    FULL: Arm(),
    "bf16 teacher, e4m3 latents": Arm("bf16"),
    "fp8 teacher, float32 latents": Arm(latents="float32"),
}
Optimizers = Sequence[torch.optim.Optimizer]


class Exposed(nn.Module):
    """A zoo model with its last hidden layer: {"logit": [B], "latent": [B, width]}."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.logit, self.width = model.logit, model.logit.in_features
        model.logit = nn.Identity()  # what is left returns what the logit read
        self.tower = model

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> dict[str, torch.Tensor]:
        latent = self.tower(dense, sparse)
        return {"logit": self.logit(latent).squeeze(1), "latent": latent}


class Student(nn.Module):
    """Rows, latents [B, d] and whether there is one, `hit` [B], -> main and auxiliary logits [B].

    Heads share features alone: the teacher's labels move neither main head nor adapter. Latents lie behind a
    stop of the gradient.
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
        return self.main(torch.cat([features, told], dim=1)).squeeze(1), self.aux(features).squeeze(1)


Answer = dict[str, torch.Tensor]
Told = dict[str, Answer]
"""What each teacher makes of a batch: ["fp8"]["logit"] [B], ["latent"] [B, d]."""


@dataclass
class Stores:
    """What each teacher left, by its name; what the FP8 one left in float32 too, for the comparison."""

    low: dict[str, Latents]
    exact: dict[int, torch.Tensor]

    def write(self, rows: Batch, told: Told, **when: int) -> None:
        for name, store in self.low.items():
            fresh = Latents.of(pairs(rows), told[name]["latent"], teacher=store.teacher, **when)
            self.low[name] = store.merged(fresh)
        self.exact |= zip(pairs(rows).tolist(), told["fp8"]["latent"], strict=True)

    def read(self, arm: Arm, rows: Batch, **when: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [B, d], zeros where there is none, and whether there is one, float32 [B]."""
        ids = pairs(rows)
        found = self.low[arm.teacher or "fp8"].look_up(ids, **when)
        if arm.latents is None:
            return torch.zeros_like(found.values), found.values.new_zeros(len(ids))
        if arm.latents == "float32":
            for place in found.hit.nonzero()[:, 0].tolist():
                found.values[place] = self.exact[int(ids[place])]
        return found.values, found.hit.float()


def pairs(rows: Batch) -> torch.Tensor:
    """The key of each row's latent [B]."""
    return rows.sparse[:, 0] * (1 << 32) + rows.sparse[:, 1]


def step(loss: torch.Tensor, optimizers: Optimizers) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def train(teacher: Exposed, rows: Iterable[Batch], optimizers: Optimizers) -> None:
    for batch in rows:
        step(bce(teacher.train()(batch.dense, batch.sparse)["logit"], batch.label), optimizers)


def loss_of(arm: Arm, main: torch.Tensor, aux: torch.Tensor, rows: Batch, told: Told) -> torch.Tensor:
    loss = bce(main, rows.label)
    return loss if arm.teacher is None else loss + bce(aux, told[arm.teacher]["logit"].sigmoid())


def freeze(teacher: Exposed, seed: int, sizes: Sizes, optimizers: Optimizers) -> Server:
    """Trains the teacher on the history, the last sixteenth of it probed, and freezes it by the plan."""
    tail = sizes.history // 16 // sizes.batch * sizes.batch
    train(teacher, sizes.batches(seed, 0, sizes.history - tail), optimizers)
    last = list(sizes.batches(seed, sizes.history - tail, tail))
    with loka.Probe(teacher, every=2, logits=lambda answer: answer["logit"]) as probe:
        train(teacher, last, optimizers)
    candidates = ("emulated:rowwise_e4m3",) if sizes.device == "cpu" else ("torch:rowwise_e4m3",)
    coarse = Settings(max_draws=4)
    report = loka.measure(probe.stats(), device=sizes.device, candidates=candidates, settings=coarse, errors_only=True)
    rows = [(batch.dense, batch.sparse) for batch in last]
    plan = loka.plan(report, loka.Budget(ne=1e-3))
    return loka.serve.freeze(teacher, plan, calibration=rows, name=f"history of world {seed}")


@torch.no_grad()
def label(rows: Batch, server: Server, plain: Callable[..., Answer], seconds: dict[str, list[float]]) -> Told:
    """By the FP8 server and by the same weights in bf16; notes the time of each."""

    def in_bf16() -> Answer:
        with torch.autocast(rows.dense.device.type, torch.bfloat16):
            answer = plain(rows.dense, rows.sparse)
        return {name: out.float() for name, out in answer.items()}

    told = {}
    for name, run in {"fp8": lambda: server((rows.dense, rows.sparse)).output, "bf16": in_bf16}.items():
        began = time.perf_counter()
        told[name] = run()
        if rows.dense.is_cuda:
            torch.cuda.synchronize()
        seconds[name].append(time.perf_counter() - began)
    return told


@dataclass(frozen=True)
class Outcome:
    """Of one seed, on held-out rows."""

    logits: dict[str, torch.Tensor]
    labels: torch.Tensor
    numbers: dict[str, float]


def run_seed(seed: int, sizes: Sizes) -> Outcome:
    """A world, its teacher, and a student of each arm."""
    torch.manual_seed(seed)
    world, config = SyntheticClicks(rows=1, seed=seed), TrainConfig(batch_size=sizes.batch)
    features = {"dense_features": world.dense_features, "vocab_sizes": world.vocab_sizes}
    kind, _, size = sizes.teacher.partition(":")
    teacher = Exposed(build(kind, size=size or "small", **features)).to(sizes.device)
    optimizers = list(build_optimizers(teacher, config).values())
    server = freeze(teacher, seed, sizes, optimizers)
    lineage = digest([list(teacher.state_dict().values())])  # latents of other weights are others
    plain = teacher if sizes.device == "cpu" else torch.compile(teacher, mode="reduce-overhead")
    on = {"device": sizes.device}
    none = torch.empty(0, dtype=torch.int64, **on), torch.empty(0, teacher.width, **on)
    empty = Latents.of(*none, teacher=lineage, version=0, written=0)
    stores = Stores({"fp8": empty, "bf16": empty}, {})
    students, learn = {}, {}
    for name in ARMS:
        torch.manual_seed(seed)
        small = DLRM(Front(**features, dim=8, bottom=(32,)), top=(64, 32))
        students[name] = Student(small, latent_width=teacher.width).to(sizes.device)
        learn[name] = list(build_optimizers(students[name], config).values())

    rows, now = sizes.stream // sizes.windows, 0
    seconds: dict[str, list[float]] = {"fp8": [], "bf16": []}
    for window in range(sizes.windows):
        seen = list(sizes.batches(seed, sizes.history + window * rows, rows))
        teacher.eval()
        answers = [label(part, server, plain, seconds) for part in seen]
        for part, told in zip(seen, answers, strict=True):
            for name, arm in ARMS.items():
                read = stores.read(arm, part, now=now, max_age=sizes.max_age)
                main, aux = students[name](part.dense, part.sparse, *read)
                step(loss_of(arm, main, aux, part, told), learn[name])
            now += len(part)
        for part, told in zip(seen, answers, strict=True):  # by weights that have not seen these clicks
            stores.write(part, told, version=server.version, written=now)
        train(teacher, seen, optimizers)
        server.refresh(teacher.state_dict())
    numbers = {f"{name} teacher labels, rows/s": sizes.batch / median(spent) for name, spent in seconds.items()}

    held = next(sizes.batches(seed, sizes.history + now, sizes.held, sizes.held))
    store, when = stores.low["fp8"], {"now": now, "max_age": sizes.max_age}
    found = store.look_up(pairs(held), **when)
    numbers |= {
        "hits": found.hit_rate,
        "too old": float(found.stale.double().mean()),
        "age, rows": float(found.age[found.hit].double().mean()),
        "age, versions": float((server.version - found.version[found.hit]).double().mean()),
        "store, bytes": store.bytes,
        "FP8 sites": len(server.card.sites),
    }
    with torch.no_grad():
        logits = {
            name: student.eval()(held.dense, held.sparse, *stores.read(ARMS[name], held, **when))[0]
            for name, student in students.items()
        }
        logits["(teacher)"] = server((held.dense, held.sparse)).output["logit"]
    return Outcome({name: logit.cpu() for name, logit in logits.items()}, held.label.cpu(), numbers)


def over(values: Iterable[float]) -> str:
    """The mean over seeds with its 95 % interval, Student's; of one seed it has no ends."""
    return estimate_mean(list(values)).shown(".4f")


def report(outcomes: Sequence[Outcome]) -> str:
    """The tables of docs/teacher.md; differences of NE are in percent, paired by seed."""

    def against(base: str, arm: str) -> str:
        pairs = (paired_difference(one.logits[base], one.logits[arm], one.labels) for one in outcomes)
        return "" if base == arm else over(pair.ne_percent.value for pair in pairs)

    rows = []
    for name in outcomes[0].logits:
        ne = over(quality(one.logits[name], one.labels).ne for one in outcomes)
        rows.append((name, ne, against(PLAIN, name), against(name, FULL)))
    numbers = [(name, over(one.numbers[name] for one in outcomes)) for name in outcomes[0].numbers]
    header = ("student learns from", "NE", "% against clicks alone", "% fp8 and e4m3 against it")
    return f"{format_table(header, rows)}\n\n{format_table(('', 'over seeds'), numbers)}"


def main(arguments: Sequence[str] | None = None) -> list[Outcome]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    sizes = Sizes(**vars(parser.parse_args(arguments)))
    if (
        min(size for size in asdict(sizes).values() if isinstance(size, int)) < 1
        or sizes.stream < sizes.windows * sizes.batch
        or sizes.history < 16 * sizes.batch
    ):
        parser.error(f"{sizes}: all at least 1, a batch of the stream for each window, and 16 of the history")
    outcomes: list[Outcome] = []
    for seed in range(sizes.seeds):
        outcomes.append(run_seed(seed, sizes))
        print(f"world {seed + 1} of {sizes.seeds} done", file=sys.stderr)
    print(report(outcomes))
    return outcomes


if __name__ == "__main__":
    main()
