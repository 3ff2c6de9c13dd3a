import command_line
import pytest
from bench_fakes import install, libraries
from forked import start_loka

import loka
from loka.cli.commands.gemm import GemmConfig, run_gemm_bench
from loka.compiler.joint_sites import IN_REGIONS
from loka.core.budget import Budget
from loka.core.exceptions import FileRefused
from loka.core.records.gemm_bench import GemmBench
from loka.measurement import Settings
from loka.report.gemm_summary import best_library, standings
from loka.report.gemm_table import gemm_table

SUITE = """model,site,kind,batch,M,K,N,count
one,a 32->48,linear,1,64,32,48,1
one,b 48->16,linear,1,96,48,16,2
one,pairs,bmm,64,8,16,8,1
two,the same,linear,1,64,32,48,3
two,experts,grouped,1,64,32,48,4
"""
ALPHA, BETA = "alpha:rowwise_e4m3", "beta:rowwise_e4m3"
# Results of layer a: y [64, 48], dx [64, 32], dW [48, 32]; of b: [96, 16], [96, 48], [16, 48].
A, B = ((64, 48), (64, 32), (48, 32)), ((96, 16), (96, 48), (16, 48))
TIMES = {
    **dict(zip(((ALPHA, shape) for shape in A), (50.0, 80.0, 80.0), strict=True)),
    **dict(zip(((BETA, shape) for shape in A), (80.0, 50.0, 50.0), strict=True)),
    **{(ALPHA, shape): 200.0 for shape in B},
    **{(BETA, shape): 125.0 for shape in B},
}


@pytest.fixture(autouse=True)
def two_libraries():
    with libraries("alpha", "beta"):
        yield


@pytest.fixture
def config(tmp_path):
    (tmp_path / "suite.csv").write_text(SUITE)
    return GemmConfig(
        out=tmp_path / "out",
        command="loka bench gemm --shapes suite.csv",
        device="cpu",
        shapes=tmp_path / "suite.csv",
        settings=Settings(max_draws=4),
        confirm_rounds=15,
    )


def test_regions_take_no_part(config, monkeypatch):
    """A contest runs sites and layers by themselves; that a region would be faster decides nothing there."""
    install(monkeypatch, measured={})
    with libraries("torch", "torch_fast"):
        bench, report = run_gemm_bench(config)
        assert loka.plan(report).decisions["one/a_32x48/output"].candidate == IN_REGIONS[0]
    arms = {arm for contest in bench.contests.values() for arm in contest.arms.values()}
    assert arms
    assert not any(name in arm for arm in arms for name in IN_REGIONS)


def test_from_suite_to_verdict(config, monkeypatch):
    timer = install(monkeypatch, measured=TIMES)
    bench, report = run_gemm_bench(config)
    assert report.complete
    assert bench.complete
    assert bench == GemmBench.load(config.out / "gemm.json")
    assert {path: layer.count for path, layer in bench.layers.items()} == {"one/a_32x48": 4, "one/b_48x16": 2}
    assert bench.not_covered == {"one: pairs": "bmm, 64 x 8x16x8", "two: experts": "grouped, 1 x 64x32x48"}
    assert bench.libraries == {"alpha": "", "beta": ""}
    chosen = {place: contest.arms["choice"] for place, contest in bench.sites().items()}
    assert chosen == {
        "one/a_32x48/output": ALPHA,
        "one/a_32x48/grad_input": BETA,
        "one/a_32x48/grad_weight": BETA,
        "one/b_48x16/output": "hp",
        "one/b_48x16/grad_input": "hp",
        "one/b_48x16/grad_weight": "hp",
    }
    found = standings(bench, bench.sites().values())
    sixth = 1 / 6
    for arm, mean in {
        "hp": 1.0,
        "alpha": (2 * 1.25 * 1.25 * 0.5**3) ** sixth,
        "alpha or hp": (2 * 1.25 * 1.25) ** sixth,
        "beta": (1.25 * 2 * 2 * 0.8**3) ** sixth,
        "beta or hp": (1.25 * 2 * 2) ** sixth,
        "choice": 8**sixth,
    }.items():
        assert found[arm].speedup.value == pytest.approx(mean)
        assert found[arm].versus is None or found[arm].versus.value == pytest.approx(8**sixth / mean)
    assert best_library(found).arm == "beta or hp"
    assert found["alpha"].fp8 == 6
    assert found["alpha or hp"].fp8 == 3
    # Against alpha: a's gradients and all of b; at a/output they run the same.
    assert found["alpha"].verdicts == {"win": 5, "tie": 1, "LOSS": 0}
    assert found["hp"].verdicts == {"win": 3, "tie": 3, "LOSS": 0}
    whole = bench.contests["one/a_32x48"]
    assert whole.arms["choice"] == f"{ALPHA} | {BETA} | {BETA}"
    assert whole.arms["alpha"] == f"{ALPHA} | {ALPHA} | {ALPHA}"
    assert whole.versus["alpha"].value == pytest.approx(210 / 150)
    assert whole.versus["beta"].value == pytest.approx(180 / 150)
    assert whole.timings[whole.arms["choice"]].speedup.value == pytest.approx(2.0)
    assert len(timer.races) == 8, "three sites and the layer, of two layers"
    text = gemm_table(bench)
    for line in (
        "2 distinct linear shapes, from 3 rows",
        "one: pairs (bmm, 64 x 8x16x8)",
        "Never slower than bf16 beyond noise: yes",
        "At least as fast as every library everywhere: yes",
        "best single library's (beta or bf16): yes, 1.081 [1.081, 1.081] times it",
        "command: loka bench gemm --shapes suite.csv",
    ):
        assert line in text
    assert "LOSS" not in text
    # One layer a of 300 us in bf16 and 150 by choice, and two of b at 300; model two has three a.
    (one,) = [line.split() for line in text.splitlines() if line.startswith("one  ")]
    (two,) = [line.split() for line in text.splitlines() if line.startswith("two  ")]
    assert one[:5] == ["one", "2", "900", "750", "1.200x"]
    assert two[:5] == ["two", "1", "900", "450", "2.000x"]
    assert two[5:] == ["1.667x", "beta", "or", "bf16"]


def test_a_choice_that_does_not_hold_up_is_a_named_loss(config, monkeypatch):
    """alpha looked twice as fast when it was picked, and is slower than both when it races again."""
    install(monkeypatch, measured=TIMES, confirmed={**TIMES, (ALPHA, A[0]): 125.0})
    bench, _ = run_gemm_bench(config)
    contest = bench.contests["one/a_32x48/output"]
    assert contest.arms["choice"] == ALPHA
    assert contest.versus["hp"].value == pytest.approx(0.8)
    assert contest.versus["beta"].value == pytest.approx(0.64)
    text = gemm_table(bench)
    assert "Never slower than bf16 beyond noise: NO (1 losses)" in text
    assert "everywhere: NO (1 to beta, 1 to beta or bf16)" in text
    assert f"LOSS one/a_32x48/output: {ALPHA} is 0.800 [0.800, 0.800] times as fast as bf16 (hp)" in text
    assert f"LOSS one/a_32x48/output: {ALPHA} is 0.640 [0.640, 0.640] times as fast as beta ({BETA})" in text


def test_a_layer_is_planned_with_what_sharing_saves_and_a_site_without(config, monkeypatch):
    """105 us against 100 at each site of b, but 315 - 60 against 300 for the three together."""
    install(monkeypatch, measured={**TIMES, **{(ALPHA, shape): 105.0 for shape in B}}, saved=20.0)
    bench, _ = run_gemm_bench(config)
    assert bench.contests["one/b_48x16/output"].arms["choice"] == "hp"
    layer = bench.contests["one/b_48x16"]
    assert layer.arms["choice"] == layer.arms["alpha or hp"] == f"{ALPHA} | {ALPHA} | {ALPHA}"
    assert layer.arms["beta or hp"] == "hp"


def test_the_error_budget_holds_for_libraries_too(config, monkeypatch):
    install(monkeypatch, measured=TIMES)
    strict = Budget(min_sqnr_db=50.0, min_speedup=1.0)
    bench, _ = run_gemm_bench(GemmConfig(**{**config.__dict__, "budget": strict}))
    for contest in bench.sites().values():
        assert set(contest.arms.values()) == {"hp"}


def test_an_interrupted_run_goes_on_and_a_finished_one_races_nothing(config, monkeypatch):
    timer = install(monkeypatch, measured=TIMES)
    bench, report = run_gemm_bench(GemmConfig(**{**config.__dict__, "time_limit": 0.0}))
    assert not report.complete
    assert not bench.complete
    assert not timer.races

    def stop_at_second_confirmation(items, description, total):
        for index, item in enumerate(items):
            if description == "confirming" and index == 1:
                raise KeyboardInterrupt
            yield item

    with pytest.raises(KeyboardInterrupt):
        run_gemm_bench(config, track=stop_at_second_confirmation)
    part = GemmBench.load(config.out / "gemm.json")
    assert not part.complete
    assert list(part.whole_layers()) == ["one/a_32x48"]
    assert "INCOMPLETE" in gemm_table(part)
    assert len(timer.races) == 4
    whole, _ = run_gemm_bench(config)
    assert whole.complete
    assert len(timer.races) == 8
    assert whole.contests["one/a_32x48"] == part.contests["one/a_32x48"]
    again, _ = run_gemm_bench(config)
    assert again == whole
    assert len(timer.races) == 8
    run_gemm_bench(GemmConfig(**{**config.__dict__, "confirm_rounds": 20}))
    assert len(timer.races) == 16, "other settings, other contests"


def test_a_damaged_result_is_not_overwritten(config, monkeypatch):
    install(monkeypatch, measured=TIMES)
    run_gemm_bench(config)
    file = config.out / "gemm.json"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(FileRefused, match="new folder"):
        run_gemm_bench(config)
    assert len(file.read_bytes()) == 300


def bench(*arguments, cwd, fails=False):
    output = cwd / "printed"
    process = start_loka("bench", *arguments, cwd=cwd, output=output)
    process.join()
    text = output.read_text()
    assert (process.exitcode != 0) == fails, text
    assert "Traceback" not in text
    return text


def test_without_a_gpu_errors_are_measured_and_no_times_claimed(tmp_path):
    (tmp_path / "suite.csv").write_text(SUITE)
    text = bench(
        "gemm", "--shapes", "suite.csv", "--candidate", "emulated:rowwise_e4m3",
        "--draws", 2, "--out", "o", cwd=tmp_path,
    )  # fmt: skip
    assert "Times need a GPU: errors only" in text
    assert "one/a_32x48/grad_weight" in text
    assert "two: experts (grouped" in text
    assert "geomean" not in text
    assert {file.name for file in (tmp_path / "o").iterdir()} == {"report.json", "plan.json", "gemm.json", "gemm.txt"}
    assert "no times to draw" in bench("plot", "o/gemm.json", cwd=tmp_path, fails=True)
    assert "2 distinct linear shapes" in bench("show", "o/gemm.json", cwd=tmp_path)


@pytest.mark.slow
def test_a_part_of_the_suite_of_published_shapes(tmp_path):
    text = bench(
        "gemm", "--model", "torcheasyrec*", "--candidate", "emulated:rowwise_e4m3",
        "--draws", 2, "--out", "o", cwd=tmp_path,
    )  # fmt: skip
    assert "torcheasyrec-wukong_criteo/top_512x64/output" in text


def test_mistakes_are_messages(tmp_path):
    assert "MLPerf-DLRM-DCNv2" in command_line.loka("bench", "gemm", "--model", "gpt*", cwd=tmp_path, fails=True)
    (tmp_path / "short.csv").write_text("model,site,M\na,b,1\n")
    assert "no column kind, K, N" in command_line.loka(
        "bench", "gemm", "--shapes", "short.csv", cwd=tmp_path, fails=True
    )
    (tmp_path / "bmm.csv").write_text("model,site,kind,M,K,N\na,b,bmm,8,8,8\n")
    assert "no row of the suite is a linear layer" in command_line.loka(
        "bench", "gemm", "--shapes", "bmm.csv", cwd=tmp_path, fails=True
    )
    assert "bfloat16 or float32" in command_line.loka(
        "bench", "gemm", "--weight-dtype", "int8", cwd=tmp_path, fails=True
    )
