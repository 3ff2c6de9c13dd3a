import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import small_run
import torch
from small_run import RandomRows, SmallModel

from loka.core.exceptions import LokaError
from loka.train import TrainConfig
from loka.validation.arms import ArmSpec
from loka.validation.initial import initial_state
from loka.validation.validate import validate

CONFIG = TrainConfig(batch_size=64, seed=3, lr=1e-2)
TRAIN, TEST = RandomRows(1280), RandomRows(600, seed=8)
SAME = ArmSpec(name="same", apply=lambda model: None, identity={"what": "nothing"})


class Wider(SmallModel):
    """Of the same name."""

    def __init__(self):
        super().__init__()
        self.more = torch.nn.Linear(2, 2)


def moved():
    """As `build` is that loads another checkpoint than before."""
    model = SmallModel()
    with torch.no_grad():
        model.mlp[3].bias.add_(1e-3)
    return model


@pytest.mark.parametrize(
    ("build", "named"),
    [(Wider, "more.weight: nothing there, torch.float32"), (moved, r"mlp.3.bias: torch.float32 \(1,\), \w+ there, ")],
)
@pytest.mark.parametrize("killed", [False, True])
def test_runs_of_another_model_of_that_name_are_refused(build, named, killed, tmp_path):
    """They were taken for this one's."""

    def kill(name, line):
        if killed and line.step == 10:
            raise KeyboardInterrupt

    def again(build, **others):
        validate(build, TRAIN, TEST, [SAME], config=CONFIG, out=tmp_path, pairs=1, **others)

    with pytest.raises(KeyboardInterrupt) if killed else nullcontext():
        again(SmallModel, on_log=kill)
    with pytest.raises(LokaError) as caught:
        again(build)
    assert killed or re.search(named, "\n".join(caught.value.why))
    again(SmallModel)


@pytest.mark.slow
def test_initial_states_are_the_same_in_another_process():
    code = "import json, torch; from small_run import SmallModel; from loka.validation.initial import initial_state\n"
    code += "torch.manual_seed(3); print(json.dumps(initial_state(SmallModel())))"
    places = [str(Path(small_run.__file__).parent), *sys.path]
    said = subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": ":".join(places)})
    torch.manual_seed(3)
    assert json.loads(said) == initial_state(SmallModel())


def test_buffers_may_be_memory_that_nobody_wrote_to():
    models = []
    for value in (0.0, 1.0):
        torch.manual_seed(3)
        models.append(SmallModel())
        models[-1].register_buffer("scratch", torch.full((4,), value))
    assert initial_state(models[0]) == initial_state(models[1])
    models[1].register_buffer("scratch", torch.zeros(5))
    assert initial_state(models[0]) != initial_state(models[1])
