"""Damaged records and hostile files of rows: each is refused by name, counted, or means what it meant.

    make fuzz                                             2,000 records and 172 files
    python tests/robustness/fuzz.py --records 500         fewer
    python tests/robustness/fuzz.py --only 1234           one case again, with its traceback

A case is a number: it says which kind of record, which damage, and where. It ends well where reading raises
one of LoKA's errors, or returns what means the same as what is written under a checksum that fits.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

for _folder in ("robustness", "data", ""):
    sys.path.append(str(Path(__file__).parents[1] / _folder))

from damage import BYTES, CONTENTS, PLACES, bomb, put, remove, with_checksum  # noqa: E402
from hostile_files import cases, read  # noqa: E402
from records import REFUSED, disagreement, records  # noqa: E402

from loka.core.exceptions import LokaError  # noqa: E402

SECONDS = 20
MEGABYTES = 500


class Hangs(BaseException):
    """A case that took longer than `SECONDS`."""


@dataclass(frozen=True)
class Outcome:
    """How one case ended: "refused", "same", or what went wrong."""

    number: int
    kind: str
    damage: str
    ended: str
    seconds: float

    @property
    def well(self):
        return self.ended in ("refused", "same", "counted")


def damaged_record(number, kinds, *, used=True, raises=False):
    """Case `number`; the record is as it was afterwards. What can be read is `used` too, for what is next."""
    draw = random.Random(number)
    name = list(kinds)[number % len(kinds)]
    kind = kinds[name]
    whole = kind.file.read_bytes()
    record = json.loads(whole)
    path, meant = kind.file, record["content"]
    sort = draw.choices(("bytes", "content", "place", "packed"), (50, 38, 7, 5))[0]
    try:
        if sort == "content":
            change = draw.choice(CONTENTS)
            meant = change(draw, json.loads(whole)["content"])
            data = with_checksum(record, meant)
            if data is None:  # such as a lone surrogate's: no checksum fits it
                data, meant = b"{}", record["content"]
            path.write_bytes(data)
        elif sort == "place":
            change = draw.choice(PLACES)
            put(path, change)
        elif sort == "packed" and kind.named:
            change, path = bomb, kind.file.with_name("packed.json.gz")
            path.write_bytes(bomb(draw, whole))
        else:
            change = draw.choice(BYTES)
            path.write_bytes(change(draw, whole))
        ended, seconds = _ends(lambda: _judged(kind, path, meant, used), raises=raises)
    finally:
        remove(path)
        kind.file.write_bytes(whole)
    return Outcome(number, name, change.__name__.strip("_"), ended, seconds)


def _judged(kind, path, meant, used):
    found = kind.read(path)
    if found is REFUSED:
        return "refused"
    if used:
        kind.use(found)
    other = disagreement(kind.again(found), meant)
    return f"another meaning of {other}" if other else "same"


def _ends(work, *, raises):
    began = time.monotonic()
    try:
        with _at_most(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ended = work()
    except LokaError as error:
        ended = "refused" if str(error) and "Traceback" not in str(error) else "refused without a word"
    except Hangs:
        ended = "hangs"
    except Exception as error:
        if raises:
            traceback.print_exc()
        ended = f"{type(error).__name__}: {str(error)[:80]}"
    return ended, time.monotonic() - began


@contextmanager
def _at_most(seconds):
    def ring(*_):
        raise Hangs

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def hostile_file(number, folder, *, raises=False):
    """Case `number` of those files, in an empty folder inside of `folder`."""
    case = cases()[number]
    own = folder / f"file-{number}"
    own.mkdir()
    try:
        case.write(own / case.name)
        ended, seconds = _ends(lambda: read(own / case.name, case.lines), raises=raises)
    finally:
        shutil.rmtree(own)
    if "well" in case.name and ended == "refused":
        ended = "refused, and nothing is wrong with it"
    return Outcome(number, "rows", case.name, ended, seconds)


def peak_megabytes():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024


def score(outcomes):
    ends = Counter(outcome.ended if outcome.well else "WRONG" for outcome in outcomes)
    slowest = max(outcome.seconds for outcome in outcomes)
    lines = [f"{len(outcomes)} cases: {dict(ends)}; the slowest took {slowest:.1f} s"]
    lines += [
        f"  {outcome.number}: {outcome.kind}, {outcome.damage}: {outcome.ended}"
        for outcome in outcomes
        if not outcome.well
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--only", type=int, help="one record again, with its traceback")
    parser.add_argument("--only-file", type=int, help="one file again, with its traceback")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="loka-fuzz-") as name:
        folder = Path(name)
        if given.only is not None or given.only_file is not None:
            record = given.only_file is None
            again = (given.only, records(folder)) if record else (given.only_file, folder)
            print((damaged_record if record else hostile_file)(*again, raises=True))
            return 0
        kinds = records(folder)
        before = peak_megabytes()
        well = [
            _told("records", [damaged_record(number, kinds) for number in range(given.records)]),
            _told("files", [hostile_file(number, folder) for number in range(len(cases()))]),
        ]
        more = peak_megabytes() - before
    print(f"peak memory: {more} MB above the {before} MB of a process that has read each record once")
    return int(more > MEGABYTES or not all(well))


def _told(what, outcomes):
    print(f"{what}: {score(outcomes)}", flush=True)
    return all(outcome.well for outcome in outcomes)


if __name__ == "__main__":
    raise SystemExit(main())
