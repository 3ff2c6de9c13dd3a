"""Kills: does a command that is stopped at random moments, and started again, end in the same bits?

    make kills                                         40 kills of each command; goes on where it stopped
    python tests/robustness/kills.py --score OUT       the tally of what was done so far

A story is a command in an empty folder, stopped by SIGKILL, or now and then by SIGTERM, one to four times at
moments of a uniform draw, started again each time, and then let go to its end. What it ends in is compared
with a run that nobody disturbed, value by value (`killed.ends`). A line a story, in a file.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
for folder in ("tests/robustness", "tests/data", "tests"):
    sys.path.insert(0, str(ROOT / folder))

from forked import SERVER  # noqa: E402
from killed import COMMANDS, ends, litter, prepared, unlike, work  # noqa: E402

KILLS, MOST_STOPS, SIGTERMS = 40, 4, 0.25
PATIENCE = 120.0  # seconds until a command counts as hanging


@dataclass(frozen=True)
class Stop:
    """A signal that reached a command `seconds` after its start; how much was saved, and how it ended."""

    signal: str
    seconds: float
    standing: int
    status: int | None
    ended_after: float


@dataclass(frozen=True)
class Story:
    command: str
    seed: int
    stops: list[Stop]
    status: int | None
    compared: int
    differs: list[str]
    litter: list[str]


def tell(command, seed, folder, expected, seconds):
    """One story, in a new folder inside `folder`, of a command that takes so many seconds undisturbed."""
    draw = random.Random(f"{command} {seed}")
    own = folder / f"{command}-{seed}"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    stops = []
    for _ in range(draw.randint(1, MOST_STOPS)):
        number = signal.SIGTERM if draw.random() < SIGTERMS else signal.SIGKILL
        stop = _stopped(command, own, number, draw.uniform(0, seconds))
        if stop is None:
            break  # it had ended
        stops.append(stop)
    status, _ = whole(command, own)
    found = ends(own)
    story = Story(command, seed, stops, status, len(found), unlike(found, expected), litter(own))
    if not story.differs and not story.litter:
        shutil.rmtree(own)
    return story


def whole(command, folder):
    """The exit status of the command that nobody stops, None where it hangs, and the seconds it took."""
    started = time.monotonic()
    process = SERVER.Process(target=work, args=(command, folder))
    process.start()
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        process.join()
        return None, time.monotonic() - started
    return process.exitcode, time.monotonic() - started


def _stopped(command, folder, number, after):
    process = SERVER.Process(target=work, args=(command, folder))
    process.start()
    process.join(after)
    if process.exitcode is not None:
        return None
    os.kill(process.pid, number)
    began = time.monotonic()
    process.join(PATIENCE)
    hangs = process.is_alive()
    if hangs:
        process.kill()
        process.join()
    lasted = round(time.monotonic() - began, 3)
    standing = COMMANDS[command].standing(folder)
    return Stop(number.name, round(after, 3), standing, None if hangs else process.exitcode, lasted)


def undisturbed(command, folder):
    """What the command ends in, and how long it takes; the second of two runs, which have to end alike."""
    found = []
    for name in ("first", "second"):
        own = folder / f"{command}-{name}"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        _, seconds = whole(command, own)
        found.append(ends(own))
        shutil.rmtree(own)
    assert not unlike(*found), f"{command} differs from itself: {unlike(*found)[:5]}"
    return found[1], seconds


def run(out, commands, kills):
    """Stories until each command was stopped `kills` times, those in `out` included."""
    SERVER.set_forkserver_preload(["torch._dynamo", "safetensors.torch", "pyarrow.parquet", "loka.cli", "killed"])
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="loka-kills-") as name:
        prepared(Path(name))
        for command in commands:
            done = [story for story in stories(out) if story["command"] == command]
            stops, seed = sum(len(story["stops"]) for story in done), len(done)
            if stops >= kills:
                continue
            expected, seconds = undisturbed(command, Path(name))
            while stops < kills:
                story = tell(command, seed, Path(name), expected, seconds)
                with out.open("a") as file:
                    file.write(json.dumps(asdict(story)) + "\n")
                stops, seed = stops + len(story.stops), seed + 1
                what = f"{len(story.differs)} differ: {story.differs[:3]}" if story.differs else "the same"
                print(f"{command} {seed}: {stops} kills; {what}; {story.litter or ''}", flush=True)


def stories(out):
    if out.exists():
        yield from map(json.loads, out.read_text().splitlines())


def score(told):
    lines = [
        "| command | kills | of them SIGTERM | runs compared | values each | that differ | hung |",
        "|" + "---|" * 7,
    ]
    for command in COMMANDS:
        own = [story for story in told if story["command"] == command]
        stops = [stop for story in own for stop in story["stops"]]
        if not own:
            continue
        terms = sum(stop["signal"] == "SIGTERM" for stop in stops)
        values = max(story["compared"] for story in own)
        differ = sum(len(story["differs"]) for story in own)
        hung = sum(stop["status"] is None for stop in stops) + sum(story["status"] is None for story in own)
        lines.append(f"| {command} | {len(stops)} | {terms} | {len(own)} | {values} | {differ} | {hung} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "kills" / "kills.jsonl")
    parser.add_argument("--kills", type=int, default=KILLS, help="of each command")
    parser.add_argument("--command", action="append", choices=tuple(COMMANDS), help="only these")
    parser.add_argument("--score", action="store_true", help="print the tally and run nothing")
    given = parser.parse_args()
    if not given.score:
        run(given.out, given.command or tuple(COMMANDS), given.kills)
    print(score(list(stories(given.out))))


if __name__ == "__main__":
    main()
