import dataclasses
import re

import pytest
from command_line import loka

import loka as library
from loka.core.records.plan import Plan
from loka.data import SyntheticClicks
from loka.measurement import Settings
from loka.train.steps.forward import arguments
from loka.zoo import build

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
    assert "trained on other rows" not in text
    return folder


def test_a_folder_is_checked(folder):
    text = loka("serve", "check", "server", *FEW, "--no-mods", cwd=folder)
    assert "600 rows answered, 0 of them with NaN" in text
    assert "alarm:" not in text
    assert "the alarm looked at 1 requests, and sees no shift before 16: --batch-size 4 gives enough" in text
    assert "emulated:rowwise_e4m3" in text
    assert "other linear layers" in loka("serve", "check", "server", "--model", "dcnv2", cwd=folder, fails=2)
    assert "no such file" in loka("serve", "check", "nowhere", *FEW, "--no-mods", cwd=folder, fails=2)


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
    assert "trained on other rows than these: ids have to be of its vocabulary" in text
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


def test_a_plan_for_a_package(folder):
    assert "python" in loka("plan", "x.json", "--target", "elsewhere", cwd=folder, fails=2)
