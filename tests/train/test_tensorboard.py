import sys
import types

import pytest
from small_run import RandomRows, small_model, stop_at

from loka.core.exceptions import MissingLibrary
from loka.train import Segments, TrainConfig, train
from loka.train.tensorboard import TensorBoard

CONFIG = TrainConfig(batch_size=64, precision="fp32", log_every=4)


class Writer:
    def __init__(self, folder, purge_step):
        self.folder, self.purge_step, self.closed = folder, purge_step, False
        self.scalars = {}
        self.made.append(self)

    def add_scalar(self, name, value, step):
        self.scalars[name, step] = value

    def close(self):
        self.closed = True


@pytest.fixture
def writers(monkeypatch):
    stand_in = types.ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    Writer.made = []
    return Writer.made


def test_log_lines_become_scalars(tmp_path, writers):
    lines = []
    segments = Segments.of_column(0, ids=(1,), name="site")
    with TensorBoard(tmp_path) as board:

        def on_log(line):
            lines.append(line)
            board(line)

        train(small_model(), RandomRows(640), config=CONFIG, on_log=on_log, segments=segments)
    (writer,) = writers
    assert writer.closed
    assert writer.folder == str(tmp_path)
    assert writer.purge_step == 4
    for line in lines:
        assert writer.scalars["ne/lifetime", line.step] == line.ne
        assert writer.scalars["auc/window", line.step] == line.reading.window.auc
        assert writer.scalars["rate", line.step] == line.rate
    last = lines[-1].reading.segments["site = 1"]
    assert writer.scalars["segment calibration/site = 1", 10] == last.calibration
    assert "segment auc/site = 1" not in {name for name, _ in writer.scalars}


def test_a_resumed_run_replaces_what_it_does_again(tmp_path, writers):
    for on_step in (stop_at(7), None):
        with TensorBoard(tmp_path / "board") as board:
            try:
                train(
                    small_model(),
                    RandomRows(640),
                    config=CONFIG,
                    on_log=board,
                    on_step=on_step,
                    checkpoints=tmp_path / "checkpoints",
                )
            except KeyboardInterrupt:
                assert on_step
    assert [writer.purge_step for writer in writers] == [4, 8]


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingLibrary, match=r"loka\[tensorboard\]"):
        TensorBoard(tmp_path)
