import dataclasses
import json

import pytest

from loka.core.device import fingerprint
from loka.core.exceptions import FileRefused
from loka.core.recipe import Gemm
from loka.core.records.gemm_bench import Contest, GemmBench, SuiteLayer, Use, joined, parted
from loka.core.storage.files import write_record

USES = (Use(model="m", site="a", count=2), Use(model="m", site="b", count=3))
LAYER = SuiteLayer(rows=4096, in_features=512, out_features=1024, uses=USES)


def bench():
    contest = Contest(arms={"hp": "hp", "choice": "hp", "torch": "torch/rowwise"})
    return GemmBench(
        machine=fingerprint("cpu"),
        command="loka bench gemm",
        settings={"tie": 0.01},
        libraries={"torch": "", "deep_gemm": "not installed"},
        layers={"one": LAYER, "two": LAYER},
        not_covered={},
        too_large={},
        contests={"two": contest, "two/grad_weight": contest, "two/output": contest, "one/output": contest},
        plan_digest="0",
        complete=False,
    )


def test_a_layer_knows_its_work():
    assert LAYER.gflop == pytest.approx(4096 * 512 * 1024 * 2 / 1e9)
    assert LAYER.count == 5
    assert str(LAYER) == "4096x512x1024"


def test_candidates_of_a_layer_are_one_text_and_back():
    several = {gemm.value: f"torch/{gemm.value}" for gemm in Gemm}
    assert parted(joined(several)) == tuple(several.values())
    assert joined({gemm.value: "hp" for gemm in Gemm}) == "hp"
    assert parted("hp") == ("hp",)


def test_contests_are_in_the_order_of_layers():
    assert list(bench().sites()) == ["one/output", "two/output", "two/grad_weight"]
    assert list(bench().whole_layers()) == ["two"]
    assert bench().active == ("torch",)
    assert bench().tie == 0.01


def test_the_file_gives_the_record_back(tmp_path):
    path = tmp_path / "bench.json"
    for made in (bench(), dataclasses.replace(bench(), complete=True)):
        made.save(path)
        assert GemmBench.load(path) == made
    kept = json.loads(path.read_text())
    assert kept["version"] == 1  # a benchmark takes hours, and its file stays readable
    path.write_text(json.dumps({**kept, "version": 2}))
    with pytest.raises(FileRefused, match="this LoKA reads 1"):
        GemmBench.load(path)


def test_names_that_other_versions_wrote_are_passed_over(tmp_path):
    bench().save(path := tmp_path / "bench.json")
    kept = json.loads(path.read_text())
    content = {**kept["content"], "of another version": 0}
    write_record(path, kind=kept["kind"], version=1, content=content)
    assert GemmBench.load(path) == bench()
