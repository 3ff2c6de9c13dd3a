"""A folder that several files of tests start from."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import SMALL, loka, measure_coarsely

from loka.cli import app


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In which `loka probe` and `loka measure` ran: stats/ and report.json; to be copied."""
    folder = tmp_path_factory.mktemp("measured")
    loka("probe", "--model", "dlrm", *SMALL, "--every", 4, "--out", "stats", cwd=folder)
    candidates = [f"--candidate=emulated:{name}" for name in ("rowwise_e4m3", "tensorwise_e4m3")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "measure_stats", measure_coarsely)
        loka("measure", "stats", "--out", "report.json", *candidates, cwd=folder)
    return folder
