"""A whole record of every kind that LoKA reads, and how each is read and would be written again."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from small_run import RandomRows, SmallModel

import loka
from loka.cli.trained_on import RunRows
from loka.core.budget import Budget
from loka.core.records.gemm_bench import GemmBench
from loka.core.records.plan import Plan
from loka.core.records.report import Report
from loka.core.records.stats import Stats, flatten
from loka.core.storage.codec import encode
from loka.measurement import Settings
from loka.measurement.cache import TimesCache
from loka.train import TrainConfig, load_newest, quality, save
from loka.train.automatic.timeline import Timeline, load_timeline
from loka.validation import pair_bank, runs
from loka.validation.arms import ArmSpec
from loka.validation.compare import Arm, Comparison, Pair
from loka.validation.paired import paired_difference
from loka.validation.record import Validation
from loka.validation.validate import validate

TESTS = Path(__file__).parents[1]
for _folder in ("report", "serve", "data"):
    if str(TESTS / _folder) not in sys.path:
        sys.path.append(str(TESTS / _folder))

REFUSED = object()
"""What is read of a record that is passed over for another one, or made anew."""

CANDIDATES = ["emulated:rowwise_e4m3"]
KEY = {"problem": "m", "machine": "cpu"}
IDENTITY = {"config": {"lr": 0.1}, "source": "rows"}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """`read` takes the path of the record file; `again` makes of what was read the content of a record.

    `named` says whether the file may have any name, one that ends in ".gz" too; `use` is what comes next.
    """

    file: Path
    read: Callable[[Path], Any]
    again: Callable[[Any], Any]
    named: bool = False
    use: Callable[[Any], object] = str


def records(folder):
    """Written into folders inside of `folder`, each with what else it needs."""
    torch.manual_seed(0)
    kinds = {**_learnt(folder), **_validated(folder), **_trained(folder), **_prepared(folder)}
    for name, kind in kinds.items():
        assert kind.file.is_file(), name
        found = kind.again(kind.read(kind.file))
        assert not disagreement(found, json.loads(kind.file.read_bytes())["content"]), name
    return kinds


def disagreement(found, content, at="it"):
    """Where what was read does not mean what is written; "" where both have the same values wherever they
    have one. Readers may leave out what earlier versions wrote, and add what those did not know."""
    if isinstance(found, Mapping) and isinstance(content, Mapping):
        keys = sorted(found.keys() & content.keys(), key=str)
        return next((no for key in keys if (no := disagreement(found[key], content[key], f"{at}.{key}"))), "")
    if isinstance(found, list | tuple) and isinstance(content, list | tuple):
        if at.endswith(".tensors"):  # names without an order
            content = sorted(content, key=str)
        if len(found) > len(content):
            return f"{at}, which is longer"
        both = enumerate(zip(found, content, strict=False))
        return next((no for place, pair in both if (no := disagreement(*pair, f"{at}[{place}]"))), "")
    same = isinstance(found, bool) == isinstance(content, bool) and found == content
    return "" if same else f"{at}: {str(found)[:40]!r}, and written is {str(content)[:40]!r}"


def _learnt(folder):
    from made_bench import bench

    model = SmallModel()
    with loka.Probe(model, every=1) as probe:
        for batch in RandomRows(64).batches(32):
            logits = model(batch.dense, batch.sparse)
            torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
    stats = probe.stats()
    stats.save(folder / "stats")
    settings = Settings(rows=32, min_draws=2, max_draws=2)
    report = loka.measure(stats, device="cpu", candidates=CANDIDATES, settings=settings)
    report.save(folder / "report" / "report.json")
    loka.plan(report, Budget(min_sqnr_db=None)).save(folder / "plan" / "plan.json")
    bench().save(folder / "bench" / "gemm.json")
    times = {"region": (1.5, 2.5), "hp": (3.0,)}
    TimesCache(folder / "times").put(KEY, times)
    (times_file,) = (folder / "times").iterdir()

    def cached(path):
        cache = TimesCache(path.parent)
        found = cache.get(KEY, Mapping[str, tuple[float, ...]])
        assert (found is None) == bool(cache.notes) or not path.exists()
        return REFUSED if found is None else found

    return {
        "stats": Kind(
            file=folder / "stats" / "stats.json",
            read=lambda path: Stats.load(path.parent),
            again=lambda found: flatten(found)[0],
            use=lambda found: loka.measure(found, device="cpu", candidates=CANDIDATES, settings=settings),
        ),
        "report": Kind(
            file=folder / "report" / "report.json",
            read=Report.load,
            again=encode,
            named=True,
            use=lambda found: (str(found), str(loka.plan(found, Budget(min_sqnr_db=None)))),
        ),
        "plan": Kind(
            file=folder / "plan" / "plan.json",
            read=Plan.load,
            again=encode,
            named=True,
            use=lambda found: (str(found), loka.convert(SmallModel(), found)),
        ),
        "bench": Kind(file=folder / "bench" / "gemm.json", read=GemmBench.load, again=encode, named=True),
        "times": Kind(file=times_file, read=cached, again=lambda found: {"key": KEY, "times": encode(found)}),
    }


def _validated(folder):
    same = ArmSpec(name="same", apply=lambda model: model, identity={"what": "nothing"})
    config = TrainConfig(batch_size=64, average="tail")
    out = folder / "validation"
    found = validate(SmallModel, RandomRows(320), RandomRows(200, seed=8), (same,), config=config, out=out, pairs=2)
    bank = pair_bank.deposit(pair_bank.Bank(), found)
    bank.save(folder / "bank" / "bank.json")
    labels = torch.arange(40) % 2
    logits = torch.linspace(-1, 1, 40)
    made = Arm(name="bf16", quality=quality(logits, labels), train_ne=0.9, rows_per_second=1.0, runs={"a": 3})
    difference = paired_difference(logits.numpy(), 2 * logits.numpy(), labels.numpy())
    pairs = tuple(Pair(seed=seed, bf16=made, fp8=made, difference=difference) for seed in range(2))
    Comparison(model="m", pairs=pairs, control=made, noise=difference).save(folder / "train" / "train.json")
    return {
        "validation": Kind(file=out / "validation.json", read=Validation.load, again=_encoded, named=True),
        "run": Kind(
            file=runs.folder_of(out, "same", 0) / "run.json",
            read=lambda path: runs._record(path.parent),
            again=_encoded,
        ),
        "bank": Kind(file=folder / "bank" / "bank.json", read=pair_bank.Bank.load, again=encode, named=True),
        "comparison": Kind(file=folder / "train" / "train.json", read=Comparison.load, again=_encoded, named=True),
    }


_DERIVED = {"verdict", "across", "over_seeds", "annealed", "outlook"}


def _encoded(found):
    return _without_derived(encode(found))


def _without_derived(content):
    """Without what is written for people and computed anew by readers: verdicts, intervals that follow."""
    if isinstance(content, list):
        return [_without_derived(entry) for entry in content]
    if not isinstance(content, dict):
        return content
    dropped = _DERIVED - ({"annealed"} if isinstance(content.get("annealed"), dict) else set())
    dropped |= {"ne_percent"} if "over_seeds" in content else set()
    return {key: _without_derived(entry) for key, entry in content.items() if key not in dropped}


def _trained(folder):
    from served import BOTH, frozen, tower

    for step in (10, 20):
        state = {"weight": torch.full((8,), float(step))}
        save(folder / "checkpoints", step=step, state=state, identity=IDENTITY)
    timeline = Timeline(file=folder / "timeline" / "timeline.json")
    timeline.begin("probe", step=0, rows=0, device=torch.device("cpu"))
    timeline.begin("fp8", step=9, rows=1152, device=torch.device("cpu"), note="3 of 9 steps sampled")
    frozen(tower(), BOTH).save(folder / "served")
    RunRows(identity="a source", parts=2).keep(folder / "served")

    def newest(path):
        found = load_newest(path.parents[1], identity=IDENTITY)
        assert found is not None
        if found.step == 10:
            assert found.skipped, "it was passed over without a word"
            return REFUSED
        return {"step": found.step, "identity": IDENTITY}

    return {
        "checkpoint": Kind(
            file=folder / "checkpoints" / "step-00000020" / "manifest.json", read=newest, again=lambda found: found
        ),
        "timeline": Kind(
            file=folder / "timeline" / "timeline.json",
            read=load_timeline,
            again=lambda events: {"events": [asdict(event) for event in events]},
            named=True,
        ),
        "card": Kind(file=folder / "served" / "card.json", read=loka.serve.card.Folder.load, again=encode, named=True),
        "trained_on": Kind(file=folder / "served" / "trained_on.json", read=RunRows.load, again=encode, named=True),
    }


def _prepared(folder):
    from click_files import made_up, write_tsv

    from loka.data import Frequency, convert, open_shards, read_manifest, read_vocabulary

    path = write_tsv(folder / "rows.tsv", made_up(60))
    out = folder / "prepared"
    convert(path, out, vocabulary=Frequency(min_count=1), workers=1)

    def opened(path):
        for batch in open_shards(path.parent).batches(32):
            assert len(batch)
        manifest = read_manifest(path.parent)
        assert all(number >= 0 for number in manifest.counts.values()), manifest.counts
        return manifest

    def again(manifest):
        shards = {str(number): asdict(shard) for number, shard in manifest.shards.items()}
        return {**asdict(manifest), "shards": shards}

    return {
        "shards": Kind(file=out / "manifest.json", read=opened, again=again),
        "vocabulary": Kind(
            file=out / "vocabulary.json",
            read=read_vocabulary,
            again=lambda found: {"vocabulary": json.loads(json.dumps(found.to_dict()))},
            named=True,
        ),
    }
