"""Records of validations as JSON: files that an earlier LoKA wrote are read, or refused with a way out; what
is written, read and written again has the same bytes; damage is refused by its place.

The files in `stored` are of validations of `small_run.SmallModel`, written before their records went through
core/storage/codec.py.
"""

import json
import lzma
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from small_run import RandomRows, SmallModel

from loka.core.error import Estimate
from loka.core.exceptions import FileRefused, LokaError
from loka.core.storage.codec import decode, encode
from loka.core.storage.files import canonical, write_record
from loka.train import TrainConfig, untracked
from loka.train.automatic.timeline import Event, Timeline, load_timeline
from loka.train.metrics import Quality
from loka.validation.annealed import Annealed
from loka.validation.arms import ArmSpec
from loka.validation.compare import Arm, Comparison, Pair
from loka.validation.pair_bank import Bank
from loka.validation.paired import PairedDifference
from loka.validation.record import ArmVerdict, SeedPair, Validation
from loka.validation.runs import Bench, CurvePoint, Run, held_out, run
from loka.validation.validate import validate
from loka.validation.variance import Expected, PairVariance
from loka.validation.verdicts import RowsVerdict

STORED = Path(__file__).parent / "stored"
TIMELINE = Path(__file__).parents[2] / "benchmarks/auto/wukong_2gf.timeline.json"
CONFIG = TrainConfig(batch_size=64, seed=3, lr=1e-2, average="tail")
SHIFTED = ArmSpec(name="shifted", apply=lambda model: pytest.fail("it trains"), identity={"shift": 0.25})
FILES = {"validation.json": Validation, "bank.json": Bank, "train.json": Comparison}


def stored(name, folder):
    """A copy in `folder`; large ones are kept packed."""
    packed = STORED / f"{name}.xz"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    data = lzma.decompress(packed.read_bytes()) if packed.exists() else (STORED / name).read_bytes()
    (folder / name).write_bytes(data)
    return folder / name


def stored_run(folder):
    """The file of a run, beside its predictions."""
    stored("runs/shifted-3/held_out.safetensors", folder)
    return stored("runs/shifted-3/run.json", folder)


def write_again(file, *path, value=None, version=1):
    """The record in `file`, with `value` at `path` of its content."""
    record = json.loads(file.read_bytes())
    held = record["content"]
    for step in path[:-1]:
        held = held[step]
    if path:
        held[path[-1]] = value
    write_record(file, kind=record["kind"], version=version, content=record["content"])


def content_of(file):
    """Without the texts of outlooks, which are for readers alone."""

    def kept(found):
        return {name: value for name, value in found.items() if name != "outlook"}

    return json.loads(file.read_bytes(), object_hook=kept)["content"]


@pytest.mark.parametrize("name", ["validation.json", "bank.json"])
def test_a_stored_file_is_read_and_written_again_as_it_was(name, tmp_path):
    before = content_of(stored(name, tmp_path))
    FILES[name].load(tmp_path / name).save(tmp_path / name)
    assert canonical(content_of(tmp_path / name)) == canonical(before)
    written = (tmp_path / name).read_bytes()
    FILES[name].load(tmp_path / name).save(tmp_path / name)
    assert (tmp_path / name).read_bytes() == written


def test_a_stored_comparison_is_read(tmp_path):
    """Its differences say neither of how many rows they are nor their KL/H."""
    before = content_of(stored("train.json", tmp_path))
    found = Comparison.load(tmp_path / "train.json")
    assert [list(vars(p.difference.ne_percent).values()) for p in found.pairs] == [
        p["difference"]["ne_percent"] for p in before["pairs"]
    ]
    assert [(p.difference.rows, p.difference.kl_percent) for p in found.pairs] == [(None, None)] * 2
    assert found.pairs[1].fp8.train_ne == math.inf
    after = encode(found)
    for part in ("model", "context", "control", "across"):
        assert canonical(after[part]) == canonical(before[part])
    assert [p["verdict"] for p in after["pairs"]] == [p["difference"]["verdict"] for p in before["pairs"]]
    found.save(tmp_path / "train.json")
    assert Comparison.load(tmp_path / "train.json") == found


def test_a_stored_run_is_not_trained_again(tmp_path):
    before = content_of(stored_run(tmp_path))
    bench = Bench(
        build=SmallModel,
        train=RandomRows(320),
        test=RandomRows(320, seed=8),
        config=CONFIG,
        out=tmp_path,
        identity={"name": "model"},
        track=untracked,
    )
    with pytest.warns(RuntimeWarning, match="do not say what their model began as"):
        (found,) = run(bench, SHIFTED, 3)
    assert canonical(encode(found)) == canonical(before["run"])
    assert held_out(tmp_path, "shifted", 3).logits.shape == (320,)
    with pytest.warns(RuntimeWarning), pytest.raises(LokaError, match=r"arm: .* there, .* now"):
        run(bench, replace(SHIFTED, identity={"shift": 0.5}), 3)


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (("run", "quality"), None, "it has to hold a quality and predictions, or say where"),
        (("held_out",), None, "it has to hold a quality and predictions, or say where"),
        (("run", "curve", 0), [1], r"run\.curve\[0\]\.ne is missing"),
        (("run", "fp8"), [], r"run\.fp8 has to be an object"),
    ],
)
def test_a_damaged_run_is_refused_by_its_place(path, value, why, tmp_path):
    write_again(stored_run(tmp_path), *path, value=value)
    with pytest.raises(FileRefused, match=why):
        held_out(tmp_path, "shifted", 3)


def test_the_looks_of_a_stored_validation_count(tmp_path):
    """Its pairs were looked at one by one: one look at all of them would be another rule."""
    stored("validation.json", tmp_path)
    with pytest.raises(LokaError, match="a look after every pair, 4 at most"):
        validate(SmallModel, RandomRows(320), RandomRows(320, seed=8), [SHIFTED], config=CONFIG, out=tmp_path)


def test_a_stored_timeline_is_read_and_written_again_as_it_was(tmp_path):
    events = load_timeline(TIMELINE)
    assert [event.phase for event in events] == ["probe", "measure", "fp8", "end"]
    assert canonical({"events": encode(events)}) == canonical(content_of(TIMELINE))
    assert Timeline(events).events == list(events)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("version", [0, 2])
def test_other_versions_are_refused_with_a_way_out(name, version, tmp_path):
    write_again(stored(name, tmp_path), version=version)
    with pytest.raises(FileRefused, match=f"it has format version {version}, and this LoKA reads 1") as caught:
        FILES[name].load(tmp_path / name)
    assert caught.value.way_out


@pytest.mark.parametrize(
    ("name", "path", "value", "why"),
    [
        ("validation.json", ("arms", 0, "average", "mean"), "much", r"arms\[0\].average.mean has to be a nu"),
        ("validation.json", ("arms", 0, "pairs", 1, "rows"), "all", r"arms\[0\].pairs\[1\].rows has to be"),
        ("validation.json", ("arms", 0, "pairs", 1, "seed"), None, r"arms\[0\].pairs\[1\].seed has to be"),
        ("validation.json", ("arms", 1, "segments"), {}, r"arms\[1\].segments has to be a list"),
        ("validation.json", ("runs", 0, "curve", 0), [1, 2], r"runs\[0\].curve\[0\].recent_ne is missing"),
        ("validation.json", ("annealed", "gain"), [0], "annealed.gain.low is missing"),
        ("validation.json", ("arms", 0, "average", "colour"), 1, r"arms\[0\].average has colour, of which"),
        ("bank.json", ("arms", 0, "pairs", 0), [3], r"arms\[0\].pairs\[0\].ne_percent is missing"),
        ("bank.json", ("arms", 0, "pairs", 0), [3, "inf"], "the pairs of shifted are no finite numbers"),
        ("bank.json", ("arms", 0, "pairs"), [], "the pairs of shifted are no finite numbers"),
        ("train.json", ("pairs", 0, "bf16", "quality", "rows"), 1.5, r"pairs\[0\].bf16.quality.rows has"),
        ("train.json", ("noise", "auc"), "none", "noise.auc has to be a list"),
    ],
)
def test_damaged_content_is_refused_by_its_place(name, path, value, why, tmp_path):
    write_again(stored(name, tmp_path), *path, value=value)
    with pytest.raises(FileRefused, match=why):
        FILES[name].load(tmp_path / name)


def test_a_damaged_timeline_is_refused_by_its_place(tmp_path):
    shutil.copy(TIMELINE, tmp_path / "t.json")
    write_again(tmp_path / "t.json", "events", 1, "step", value="late")
    with pytest.raises(FileRefused, match=r"events\[1\].step has to be a whole number, and is 'late'"):
        load_timeline(tmp_path / "t.json")


NUMBERS = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf])
COUNTS = st.integers(0, 10**6)
TEXTS = st.text(max_size=8)
ESTIMATES = st.builds(Estimate, st.floats(-1e6, 1e6), NUMBERS, NUMBERS)
QUALITIES = st.builds(Quality, NUMBERS, NUMBERS, NUMBERS, NUMBERS, COUNTS, NUMBERS)
DIFFERENCES = st.builds(PairedDifference, ESTIMATES, ESTIMATES, ESTIMATES, st.none() | COUNTS, st.none() | ESTIMATES)
EXPECTED = st.builds(Expected, st.floats(0, 1e3), st.integers(0, 6), TEXTS)
VARIANCES = st.builds(
    PairVariance,
    mean=NUMBERS,
    pairs=st.integers(1, 40),
    rows=COUNTS,
    between_pairs=st.floats(0, 1e3) | st.just(math.nan),
    rows_error=st.floats(0, 1e3) | st.just(math.nan),
    clusters=st.none() | COUNTS,
    effective_clusters=st.none() | COUNTS,
    expected=st.none() | EXPECTED,
)
VERDICTS = st.builds(
    RowsVerdict, name=TEXTS, variance=VARIANCES, clicks=COUNTS, limit=st.floats(1e-3, 1.0), tail=st.floats(1e-6, 0.5)
)
RUNS = st.builds(
    Run,
    arm=TEXTS,
    seed=COUNTS,
    quality=st.none() | QUALITIES,
    train_ne=NUMBERS,
    rows_per_second=NUMBERS,
    curve=st.lists(st.builds(CurvePoint, COUNTS, NUMBERS, NUMBERS), max_size=3).map(tuple),
    fp8=st.dictionaries(TEXTS, COUNTS, max_size=2),
    mean_quality=st.none() | QUALITIES,
    final_rate=NUMBERS,
    broke=TEXTS,
)
ARM_VERDICTS = st.builds(
    ArmVerdict,
    name=TEXTS,
    pairs=st.lists(st.builds(SeedPair, seed=COUNTS, difference=DIFFERENCES), max_size=2).map(tuple),
    average=st.none() | VERDICTS,
    segments=st.lists(VERDICTS, max_size=2).map(tuple),
    broke=TEXTS,
    readings=st.lists(VERDICTS, max_size=1).map(tuple),
    key=TEXTS,
)
ANNEALED = st.builds(
    Annealed,
    final_rate=NUMBERS,
    runs=COUNTS,
    gain=st.none() | ESTIMATES,
    first_order=st.none() | NUMBERS,
    divergence=st.none() | NUMBERS,
)
CONTEXTS = st.dictionaries(TEXTS, st.none() | COUNTS | TEXTS | st.lists(TEXTS, max_size=2), max_size=2)
ARMS = st.builds(
    Arm,
    name=TEXTS,
    quality=QUALITIES,
    train_ne=NUMBERS,
    rows_per_second=NUMBERS,
    runs=st.dictionaries(TEXTS, COUNTS, max_size=2),
)
PAIRS = st.lists(st.builds(Pair, seed=COUNTS, bf16=ARMS, fp8=ARMS, difference=DIFFERENCES), max_size=3)
RECORDS = {
    Run: lambda: RUNS,
    RowsVerdict: lambda: VERDICTS,
    Annealed: lambda: ANNEALED,
    Event: lambda: st.builds(Event, phase=TEXTS, step=COUNTS, rows=COUNTS, seconds=NUMBERS, note=TEXTS),
    Comparison: lambda: st.builds(
        Comparison,
        model=TEXTS,
        pairs=PAIRS.map(tuple),
        control=st.none() | ARMS,
        noise=st.none() | DIFFERENCES,
        context=CONTEXTS,
    ),
    Validation: lambda: st.builds(
        Validation,
        model=TEXTS,
        control=TEXTS,
        limit=NUMBERS,
        segment_limit=NUMBERS,
        seeds=st.lists(COUNTS, max_size=3).map(tuple),
        arms=st.lists(ARM_VERDICTS, max_size=2).map(tuple),
        runs=st.lists(RUNS, max_size=2).map(tuple),
        context=CONTEXTS,
        planned=st.none() | COUNTS,
        annealed=st.none() | ANNEALED,
        world=TEXTS,
        setting=TEXTS,
        expected=st.dictionaries(TEXTS, EXPECTED, max_size=2),
    ),
}


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_any_record_is_written_read_and_written_again_with_the_same_bytes(kind):
    # Shrinking takes minutes; and how long an example takes to make says what else the machine does.
    @settings(max_examples=25, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
    @given(RECORDS[kind]())
    def there_and_back(found):
        text = json.dumps(encode(found), allow_nan=False)
        again = decode(kind, json.loads(text))
        assert json.dumps(encode(again), allow_nan=False) == text
        assert repr(again) == repr(found), "nan is not equal to itself, but reads alike"

    there_and_back()
