import dataclasses
import os
import re
from unittest import mock

import pytest
from command_line import loka

import loka as library
from loka.cli.trained_on import RunRows
from loka.core.records.plan import Plan
from loka.data import SyntheticClicks
from loka.measurement import Settings
from loka.train.steps.forward import arguments
from loka.zoo import build

OTHER = "trained on other rows than these: ids have to be of its vocabulary"
FEW = ("--model", "dlrm", "--rows", "3000")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    kept = ("--checkpoints", "run", "--average", "tail")
    loka("train", *FEW, "--batch-size", "512", "--no-mods", *kept, cwd=folder)
    world = SyntheticClicks(rows=2400, seed=0)
    model = build("dlrm", dense_features=world.dense_features, vocab_sizes=world.vocab_sizes)
    with library.Probe(model, every=1, effect_samples=0) as probe:
        model(*arguments(next(world.batches(64)))).sum().backward()
    probe.stats().save(folder / "stats")
    report = library.measure(
        probe.stats(),
        device="cpu",
        candidates=["emulated:rowwise_e4m3"],
        settings=Settings(rows=64, max_draws=2, min_draws=2),
    )
    library.plan(report, force={"*/output": "emulated:rowwise_e4m3"}).save(folder / "plan.json")
    text = loka(
        "serve", "freeze", "--plan", "plan.json", "--checkpoint", "run", "--no-mods", *FEW,
        "--calibration-rows", "300", "--out", "server", cwd=folder,
    )  # fmt: skip
    assert "calibrated with 300 rows of 'held-out rows of synthetic, 2400 + 600 held out'" in text
    assert "written: server" in text
    assert "the weights are those of the last step, not their mean" in text
    assert OTHER not in text
    return folder


def test_a_folder_is_checked(folder):
    text = loka("serve", "check", "server", *FEW, "--no-mods", cwd=folder)
    assert "600 rows answered, 0 of them with NaN" in text
    assert "alarm:" not in text
    assert "the alarm looked at 1 requests, and sees no shift before 16: --batch-size 4 gives enough" in text
    assert "emulated:rowwise_e4m3" in text
    assert "other linear layers" in loka("serve", "check", "server", "--model", "dcnv2", cwd=folder, fails=2)
    assert "no such file" in loka("serve", "check", "nowhere", *FEW, "--no-mods", cwd=folder, fails=2)


@pytest.mark.slow
def test_rows_of_another_vocabulary_are_told_by_every_command(folder, tmp_path):
    """One shop of the training part is renamed so that it sorts first: as many ids, and most name another shop."""
    lines = [f"{n % 3 % 2},{n % 90},s{n % 31:02},c{n % 10}" for n in range(3000)]
    (tmp_path / "schema.json").write_text('{"label": "clicked", "dense": ["age"], "sparse": ["shop", "city"]}')
    for name, shop in (("rows.csv", "s30"), ("new.csv", "a00")):
        renamed = [line.replace(",s30,", f",{shop},") for line in lines[:2400]] + lines[2400:]
        (tmp_path / name).write_text("\n".join(["clicked,age,shop,city", *renamed]) + "\n")
    model = ("--model", "dlrm", "--no-mods", "--schema", "schema.json")
    loka("train", *model, "--data", "rows.csv", "--batch-size", 64, "--checkpoints", "run", cwd=tmp_path)
    loka("probe", *model, "--data", "rows.csv", "--checkpoint", "run", "--batch-size", 64, cwd=tmp_path)
    few = ("--candidate", "emulated:rowwise_e4m3", "--errors-only", "--no-cache", "--inference", 1)
    loka("measure", "stats", *few, cwd=tmp_path)
    loka("plan", "report.json", "--force", "*/output=emulated:rowwise_e4m3", cwd=tmp_path)
    frozen = ("--plan", "plan.json", "--checkpoint", "run", "--data", "rows.csv")
    assert OTHER not in loka("serve", "freeze", *model, *frozen, cwd=tmp_path)
    for command in (("check",), ("bench", "--seconds", "0.05", "--batch-size", 8)):
        run = ("serve", command[0], "server", *command[1:], *model)
        assert OTHER not in loka(*run, "--data", "rows.csv", cwd=tmp_path), command
        assert OTHER in loka(*run, "--data", "new.csv", cwd=tmp_path), command
    no_compiler = {"CXX": "none", "PATH": str(tmp_path)}
    with mock.patch.dict(os.environ, no_compiler):
        text = loka("serve", "package", "server", *model, "--data", "new.csv", cwd=tmp_path, fails=2)
    assert OTHER in text
    assert "C++ compiler" in text
    RunRows(identity="of two ranks", parts=2).keep(tmp_path / "server")
    assert OTHER in loka("serve", "check", "server", *model, "--data", "rows.csv", cwd=tmp_path), "a table has one part"
    other = build("dlrm", dense_features=1, vocab_sizes=(32, 11))
    server = library.serve.load(tmp_path / "server", other)
    server.refresh(other.state_dict())
    server.save(tmp_path / "server")
    text = loka("serve", "check", "server", *model, "--data", "new.csv", cwd=tmp_path)
    assert OTHER not in text, "what Python saved may be of another run"
    assert OTHER not in loka("serve", "check", "server", *FEW, "--no-mods", cwd=folder)


def test_rows_that_moved_fail_the_check(folder, monkeypatch):
    import loka.cli.commands.serve as command

    def moved(batch):
        dense, *others = arguments(batch)
        return dense * 1000, *others

    monkeypatch.setattr(command, "arguments", moved)
    few = ("--batch-size", "4")
    text = loka("serve", "check", "server", *FEW, *few, "--no-mods", cwd=folder, fails=1)
    assert "alarm: " in text
    assert "looked at" not in text


def test_the_load_test(folder):
    few = ("--batch-size", "16", "--seconds", "0.5", "--load", "0.2")
    text = loka("serve", "bench", "server", *FEW, *few, "--no-mods", cwd=folder)
    assert "these times say nothing of a GPU's" in text
    assert "p99 " in text
    assert "0 unanswered, 0 failed" in text


def test_what_cannot_be_frozen(folder):
    command = ("serve", "freeze", *FEW, "--no-mods", "--plan", "plan.json")
    assert "holds no checkpoint" in loka(*command, "--checkpoint", "none", cwd=folder, fails=2)
    (folder / "lr=0.1.json").write_bytes((folder / "plan.json").read_bytes())
    at_a_rate = ("serve", "freeze", *FEW, "--no-mods", "--plan", "lr=0.1.json", "--checkpoint", "none")
    assert "holds no checkpoint" in loka(*at_a_rate, cwd=folder, fails=2)
    assert "plan.json is a file" in loka(*command, "--checkpoint", "run", "--out", "plan.json", cwd=folder, fails=2)
    assert "ROWS=FILE" in loka(*command, "--plan", "²=plan.json", "--checkpoint", "none", cwd=folder, fails=2)
    assert Plan.load(folder / "plan.json").decisions


def test_plans_by_numbers_of_rows(folder):
    plan = Plan.load(folder / "plan.json")
    first = next(site for site, made in plan.decisions.items() if made.candidate != "hp")
    few = dataclasses.replace(plan.decisions[first], candidate="hp")
    dataclasses.replace(plan, decisions={**plan.decisions, first: few}).save(folder / "few.json")
    command = ("serve", "freeze", *FEW, "--no-mods", "--checkpoint", "run", "--calibration-rows", "300")
    plans = ("--plan", "16=few.json", "--plan", "4096=plan.json")
    text = loka(*command, *plans, "--seed", 1, "--out", "by_rows", "--no-graphs", cwd=folder)
    assert OTHER in text
    assert re.search(r"16 rows: 1 of \d+ sites run in high precision", text)
    assert "64 rows:" not in text
    text = loka(*command, "--plan", "few.json", "--plan", "9=plan.json", cwd=folder, fails=2)
    assert "ROWS=FILE" in text
    text = loka(*command, "--plan", "9=plan.json", cwd=folder, fails=2)
    assert "no plan for 4096 rows" in text


def test_a_report_for_serving(folder):
    few = ("--candidate", "emulated:rowwise_e4m3", "--errors-only", "--no-cache", "--out", "serving.json")
    assert "batch is inf" in loka("measure", "stats", "--inference", "inf", cwd=folder, fails=2)
    text = loka("measure", "stats", "--inference", "0.5", *few, cwd=folder)
    assert "weights are quantized once, as loka.serve keeps them" in text
    report = library.Report.load(folder / "serving.json")
    assert {site.problem.m for site in report.sites.values()} == {32}
    assert {site.problem.gemm.value for site in report.sites.values()} == {"output"}


@pytest.mark.slow
def test_a_package_is_written_and_run(folder):
    text = loka("serve", "package", "server", *FEW, "--no-mods", "--out", "dlrm.pt2", "--most", 64, cwd=folder)
    assert "dlrm.pt2: 1 to 64 rows; run without loka at (1, 37, 64)" in text
    assert (folder / "dlrm.pt2").exists()
    weights = ("serve", "package", "server", *FEW, "--no-mods", "--weights-for", "dlrm.pt2")
    assert "weights for dlrm.pt2" in loka(*weights, "--out", "dlrm.pt", cwd=folder)
    assert (folder / "dlrm.pt").exists()
    assert "dlrm.pt2 is the package" in loka(*weights, "--out", "dlrm.pt2", cwd=folder, fails=2)
    assert "--most with --weights-for would change nothing" in loka(*weights, "--most", 4, cwd=folder, fails=2)


def test_a_plan_for_a_package(folder):
    assert "python" in loka("plan", "x.json", "--target", "elsewhere", cwd=folder, fails=2)
