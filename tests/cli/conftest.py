"""A folder that several files of tests start from."""

import sys
from pathlib import Path

import pytest
from command_line import SMALL, loka, measure_coarsely

from loka.cli import app

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))  # with_pyarrow.py


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    """In which `loka probe` and `loka measure` ran: stats/ and report.json; to be copied."""
    folder = tmp_path_factory.mktemp("measured")
    loka("probe", "--model", "dlrm", *SMALL, "--every", 4, "--out", "stats", cwd=folder)
    candidates = [f"--candidate=emulated:{name}" for name in ("rowwise_e4m3", "tensorwise_e4m3")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "measure_stats", measure_coarsely)
        loka("measure", "stats", "--out", "report.json", *candidates, cwd=folder)
    return folder


@pytest.fixture
def net(tmp_path, monkeypatch):
    """The name of an own model, of two linear layers."""
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, dense_features, vocab_sizes):\n"
        "        super().__init__()\n"
        "        self.a = torch.nn.Linear(dense_features, 37)\n"
        "        self.b = torch.nn.Linear(37, 1)\n"
        "    def forward(self, dense, sparse):\n"
        "        return self.b(torch.relu(self.a(dense))).squeeze(1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return "mine:Net"
