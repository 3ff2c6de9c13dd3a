import pytest
from typer.testing import CliRunner

from loka.cli.app import app
from loka.core.exceptions import PlanMismatch
from loka.core.numerics.effect import OTHER_PARTS
from loka.core.records.stats import Stats


def probed(folder, seed, *options):
    command = ["probe", "--model", "dlrm", "--rows", "1200", "--every", "2", "--seed", str(seed), *options]
    done = CliRunner().invoke(app, [*command, "--out", str(folder)], catch_exceptions=False)
    assert done.exit_code == 0
    return Stats.load(folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    return first, second, probed(first, 0), probed(second, 1, "--base-rate", "0.31")


def test_folders_are_merged(two, tmp_path):
    first, second, a, b = two
    command = ["merge", str(first), str(second), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    merged = Stats.load(tmp_path)
    assert f"{a.sampled_steps + b.sampled_steps} of {a.steps + b.steps} steps sampled" in done.output
    assert any(layer.no_effect == OTHER_PARTS for layer in merged.layers.values()), "the seeds' models are not alike"
    assert OTHER_PARTS in " ".join(done.output.split())
    for path, layer in merged.layers.items():
        count = sum(part.layers[path].operands["input"].numbers["count"] for part in (a, b))
        assert layer.operands["input"].numbers["count"] == count
        mine, theirs = (part.layers[path].effects for part in (a, b))
        for name, effect in layer.effects.items():
            assert effect.count == pytest.approx(mine[name].count + theirs[name].count)


def test_a_folder_given_twice_is_refused(two, tmp_path):
    first, second, _, _ = two
    command = ["merge", str(first), str(second), str(first), "--out", str(tmp_path / "merged")]
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, PlanMismatch)
    assert "statistics 3 are statistics 1 once more" in str(refused.exception)
    assert not (tmp_path / "merged").exists()


def test_a_known_base_rate_sets_the_entropy(two):
    effect = next(effect for layer in two[3].layers.values() for effect in layer.effects.values())
    assert effect.probabilities[0] / effect.count == pytest.approx(0.31)


@pytest.mark.slow
def test_a_cadence_is_a_number_or_auto(tmp_path):
    command = ["probe", "--model", "dlrm", "--rows", "600", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*command, "--every", "auto"], catch_exceptions=False)
    assert done.exit_code == 0
    assert Stats.load(tmp_path).sampled_steps >= 1
    refused = CliRunner().invoke(app, [*command, "--every", "0"])
    assert refused.exit_code != 0
    assert "a number from 1 on, or auto" in str(refused.exception)
