"""Commands that are killed and started again; `make kills` does it two hundred times."""

from __future__ import annotations

from pathlib import Path

import pytest
from killed import prepared
from kills import score, tell, undisturbed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills")
    prepared(folder)
    return folder


# Training by a plan, --auto and validation are killed in test_cli.py, test_auto.py and test_validate.py.
@pytest.mark.parametrize("command", ["convert", "measure"])
def test_killed_and_started_again_it_ends_in_the_same_bits(folder: Path, command: str) -> None:
    expected, seconds = undisturbed(command, folder)
    stops = 0
    for seed in range(2):
        story = tell(command, seed, folder, expected, seconds)
        stops += len(story.stops)
        assert story.status == 0
        assert story.differs == []
        assert all(stop.status is not None for stop in story.stops), "it hung"
    assert stops


def test_the_tally_counts_kills_and_what_differs() -> None:
    story = {
        "command": "train",
        "seed": 0,
        "stops": [{"signal": "SIGTERM", "status": 143}, {"signal": "SIGKILL", "status": None}],
        "status": 0,
        "compared": 7,
        "differs": ["checkpoint/step"],
        "litter": [],
    }
    assert score([story, {**story, "differs": []}]).splitlines()[2] == "| train | 4 | 2 | 2 | 7 | 1 | 2 |"
