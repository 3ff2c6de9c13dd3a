import errno
import json
import os
import random
import re
import signal
import time

import numpy as np
import pytest
import torch
from durable import full
from forked import SERVER
from fp8_run import CONFIG, digest, make_plan, tower
from fp8_server import serve
from small_run import RandomRows, stop_at

from loka.core.exceptions import CheckpointRefused, FileRefused
from loka.core.storage.files import sha256_of_file, write_record
from loka.nn import fp8_runs
from loka.train import CheckpointNotSaved, evaluate, load_newest, train
from loka.train.checkpointing.state import plan_in

KILLS = 20
STEPS = 90


@pytest.fixture(scope="module")
def plan():
    plan = make_plan()
    assert {path for path in ("mlp.0", "mlp.4", "side") if plan.candidates(path)["output"] != "hp"} == {
        "mlp.0",
        "mlp.4",
        "side",
    }
    return plan


@pytest.fixture
def server():
    ours, theirs = SERVER.Pipe()
    process = SERVER.Process(target=serve, args=(theirs, STEPS))
    process.start()
    theirs.close()
    yield ours
    ours.close()
    process.join()


def start(server, folder):
    server.send(folder)
    return int(heard(server, "pid"))


def heard(server, wanted):
    kind, _, text = server.recv().partition(" ")
    assert kind == wanted, f"{kind} {text}"
    return text


def rest(server):
    return list(iter(server.recv, "gone"))


@pytest.mark.slow
def test_twenty_kills_change_no_bit(tmp_path, server):
    """SIGKILL some steps and a part of a step or of a save after the start, twenty times over. Weights,
    optimizers, counters, metrics, random state and plan end as without."""
    moments, reached, resumed = random.Random(0), 0, 0
    for _ in range(KILLS):
        pid = start(server, tmp_path / "killed")
        steps = [int(heard(server, "step")) for _ in range(moments.randint(1, 5))]
        time.sleep(moments.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        steps += [int(line.removeprefix("step ")) for line in rest(server)]
        assert steps[0] <= reached + 2, "a step was skipped; one may be saved and not told"
        assert steps[0] > reached - CONFIG.checkpoint_every, "more than what was not saved is lost"
        resumed += steps[0] > 1
        reached = steps[-1]
    assert resumed > KILLS / 2
    assert reached < STEPS
    ends = {}
    for name in ("killed", "straight"):
        start(server, tmp_path / name)
        ends[name] = json.loads(rest(server)[-1].removeprefix("end "))
    assert ends["killed"].pop("resumed") >= reached - CONFIG.checkpoint_every
    assert ends["straight"].pop("resumed") is None
    assert ends["killed"] == ends["straight"]


ROWS = RandomRows(16 * 8)


def test_resuming_puts_the_counts_back(tmp_path, plan):
    straight, halves = tower(), tower()
    train(straight, ROWS, config=CONFIG, plan=plan)
    with pytest.raises(KeyboardInterrupt):
        train(halves, ROWS, config=CONFIG, plan=plan, checkpoints=tmp_path, on_step=stop_at(5))
    resumed = tower(seed=1)
    result = train(resumed, ROWS, config=CONFIG, plan=plan, checkpoints=tmp_path)
    assert result.resumed_from == 5
    assert fp8_runs(resumed) == fp8_runs(straight)
    assert fp8_runs(resumed)["side/output"] == 8
    assert digest(resumed.state_dict()) == digest(straight.state_dict())


def test_a_finished_run_by_a_plan_evaluates_alike(tmp_path, plan):
    first, again = tower(), tower(seed=1)
    for model in (first, again):
        train(model, ROWS, config=CONFIG, plan=plan, checkpoints=tmp_path)
    held_out = RandomRows(320, seed=9)
    logits = [evaluate(m, held_out, batch_size=16, precision="bf16")[0] for m in (first, again)]
    assert np.array_equal(*logits)


def test_a_checkpoint_names_no_module_of_ours(tmp_path, plan):
    """Files may move: nothing that is read again says where a class of LoKA stood when it was written."""
    train(tower(), ROWS, config=CONFIG, plan=plan, checkpoints=tmp_path / "run")
    plan.save(tmp_path / "plan.json")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"state.pt", "manifest.json", "plan.json"}
    for path in files:
        found = re.findall(rb"\bloka\.[a-z_.]+", path.read_bytes())
        assert not found, (path, found)


def test_a_checkpoint_holds_its_plan(tmp_path, plan):
    train(tower(), ROWS, config=CONFIG, plan=plan, checkpoints=tmp_path)
    found = load_newest(tmp_path)
    assert plan_in(found.state).to_json() == plan.to_json()
    with pytest.raises(CheckpointRefused, match=r"mlp\.0/output"):  # another plan is another run
        train(tower(), ROWS, config=CONFIG, plan=make_plan(keep=("mlp.0",)), checkpoints=tmp_path)
    with pytest.raises(CheckpointRefused, match="plan"):
        train(tower(), ROWS, config=CONFIG, checkpoints=tmp_path)


def test_a_full_disk_for_a_while_costs_no_step(tmp_path, plan, monkeypatch):
    real, full = os.fsync, []

    def fsync(handle):
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    def fill(step):
        full[:] = [True] if 4 <= step < 7 else []

    monkeypatch.setattr(os, "fsync", fsync)
    straight, model = tower(), tower()
    train(straight, ROWS, config=CONFIG, plan=plan)
    with pytest.warns(RuntimeWarning, match=r"(?s)No space left.*step-00000003 is the newest.*goes on"):
        result = train(model, ROWS, config=CONFIG, plan=plan, checkpoints=tmp_path, on_step=fill)
    assert len(result.unsaved) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000008"]
    assert digest(model.state_dict()) == digest(straight.state_dict())


def test_a_full_disk_at_the_end_is_an_error(tmp_path, monkeypatch):
    def fill(step):
        if step == 7:
            monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(CheckpointNotSaved, match=r"(?s)step-00000008.*No space left.*step-00000006 is the"):
        train(tower(), ROWS, config=CONFIG, checkpoints=tmp_path, on_step=fill)


def aged(folder, plan, **of_plan):
    """Makes the newest checkpoint one of a version that could run several layers as one, under a drift
    guard."""
    path = load_newest(folder).path
    state = torch.load(path / "state.pt", weights_only=True)
    before = {**plan.to_json(), "chains": {}, "crosses": {}}
    before["budget"] = {**before["budget"], "chains": "measured", "chain_recipes": ["e4m3_row"]}
    state["plan"] = state["given_plan"] = json.dumps({**before, **of_plan})
    state["fp8"]["scales"], state["beside"] = [], {"valve": "{}"}
    torch.save(state, path / "state.pt")

    record = json.loads((path / "manifest.json").read_text())
    identity = record["content"]["identity"]
    identity["plan"] = {**identity["plan"], "wholes": dict(of_plan.get("chains", {})), "turned": []}
    identity["beside"] = {"valve": {"every": 300, "watch": 4}}
    file = path / "state.pt"
    content = {**record["content"], "sha256": sha256_of_file(file), "bytes": file.stat().st_size}
    write_record(path / "manifest.json", kind=record["kind"], version=record["version"], content=content)


def halfway(folder, plan):
    with pytest.raises(KeyboardInterrupt):
        train(tower(), ROWS, config=CONFIG, plan=plan, checkpoints=folder, on_step=stop_at(5))


def test_a_checkpoint_of_an_earlier_version_goes_on(tmp_path, plan):
    straight, resumed = tower(), tower(seed=1)
    train(straight, ROWS, config=CONFIG, plan=plan)
    halfway(tmp_path, plan)
    aged(tmp_path, plan)
    given = plan_in(load_newest(tmp_path).state, "given_plan")
    assert given == plan
    assert train(resumed, ROWS, config=CONFIG, plan=given, checkpoints=tmp_path).resumed_from == 5
    assert digest(resumed.state_dict()) == digest(straight.state_dict())


def test_a_checkpoint_of_an_earlier_version_that_ran_layers_together_is_refused(tmp_path, plan):
    halfway(tmp_path, plan)
    aged(tmp_path, plan, chains={"mlp.0": {"recipe": "e4m3_row"}})
    with pytest.raises(FileRefused, match=r"(?s)earlier version.*chains: mlp\.0.*plan again from its report"):
        plan_in(load_newest(tmp_path).state, "given_plan")
    with pytest.raises(CheckpointRefused, match=r"plan\.wholes"):
        train(tower(), ROWS, config=CONFIG, plan=plan, checkpoints=tmp_path)
