import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install 'loka[data]')")

from fuzz import MEGABYTES, damaged_record, hostile_file, peak_megabytes, score
from hostile_files import cases
from records import records

SLOW = {"bomb.csv.gz", "sparse.tsv", "10.csv", "category-large.parquet"}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    return records(tmp_path_factory.mktemp("records"))


def test_damaged_records_are_refused_or_mean_what_they_say(kinds):
    before = peak_megabytes()
    outcomes = [damaged_record(number, kinds, used=False) for number in range(150)]
    assert all(outcome.well for outcome in outcomes), score(outcomes)
    assert sum(outcome.ended == "refused" for outcome in outcomes) > 100
    assert peak_megabytes() - before < MEGABYTES


def test_hostile_files_are_refused_or_counted(tmp_path):
    """One in eight, and all that have nothing wrong with them."""
    names = [case.name for case in cases()]
    chosen = [n for n, name in enumerate(names) if name not in SLOW and (n % 8 == 1 or "well" in name)]
    outcomes = [hostile_file(number, tmp_path) for number in chosen]
    assert all(outcome.well for outcome in outcomes), score(outcomes)
    assert len(outcomes) >= 25


@pytest.mark.slow
def test_two_thousand_records_and_all_files():
    done = subprocess.run([sys.executable, Path(__file__).parent / "fuzz.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
