from collections import Counter

import pytest

from loka.core.exceptions import DataRefused, UnknownName
from loka.zoo.shapes import lrm_gemm_shapes, of_models, read_shapes

# Of the forward pass, summed from a column that the file once had: a mistyped size shows here.
GFLOP = {
    "LoKA-anchor": 517.543,
    "MLPerf-DLRM-DCNv2": 262.642,
    "MLPerf-DLRMv1-dot": 9.371,
    "BARS-DCNv2-criteo_x1": 9.431,
    "Wukong-0.5GF": 870.505,
    "Wukong-2GF": 2917.938,
    "Wukong-22GF": 47582.662,
    "Wukong-108GF": 80206.046,
    "FuxiCTR-WuKong-default(criteo39)": 134.561,
    "TorchEasyRec-wukong_criteo": 21.993,
    "NVIDIA-HSTU-bench": 11011.759,
    "DLRMv3-HSTU": 1202.591,
    "KuaiRand-1K-HSTU": 206.158,
    "RankMixer-100M": 463.856,
    "RankMixer-1B": 4947.802,
    "OneTrans-S": 1035.624,
    "OneTrans-L": 3027.147,
    "InterFormer-like": 1583.702,
}


def test_the_suite_has_the_flop_of_its_sources():
    shapes = lrm_gemm_shapes()
    assert Counter(shape.kind for shape in shapes) == {"linear": 99, "bmm": 25, "grouped": 6}
    assert len({(s.m, s.k, s.n) for s in shapes if s.kind == "linear"}) == 71
    gflop = Counter()
    for s in shapes:
        gflop[s.model] += 2e-9 * s.batch * s.m * s.k * s.n * s.count
    assert gflop == {model: pytest.approx(told, abs=0.01) for model, told in GFLOP.items()}


def test_a_file_of_ones_own(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text('\ufeffsite,kind,model,N,K,M,extra\n"a, b",linear,net,3,2,1,x\n', encoding="utf-8")
    (shape,) = read_shapes(file)
    assert (shape.model, shape.site, shape.m, shape.k, shape.n) == ("net", "a, b", 1, 2, 3)
    assert (shape.batch, shape.count) == (1, 1)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("net,a,linear,0,2,3", "M is '0'"),
        ("net,a,linear,1.5,2,3", "M is '1.5'"),
        ("net,a,linear,1,,3", "K is ''"),
        ("net,a,linear,1,2", "N is ''"),
        ("net,a,conv,1,2,3", "kind 'conv'"),
        ("net,a,linear,1,2,3,7", "a linear layer has batch 1, not 7"),
        ("net,a,linear,1,2,3,1,40", "fields without a column: 40"),
    ],
)
def test_rows_that_are_no_gemm_are_named(tmp_path, row, told):
    file = tmp_path / "mine.csv"
    file.write_text(f"model,site,kind,M,K,N,batch\nnet,fine,linear,1,2,3,1\n{row}\n")
    with pytest.raises(DataRefused) as error:
        read_shapes(file)
    assert f"line 3: {told}" in str(error.value)


def test_rows_beyond_those_that_are_named_are_counted(tmp_path):
    path = tmp_path / "shapes.csv"
    path.write_text("model,site,kind,M,K,N\n" + "m,a,linear,1,0,3\n" * 12)
    with pytest.raises(DataRefused) as refused:
        read_shapes(path)
    assert len(refused.value.why) == 11
    assert refused.value.why[-1] == "and 2 more"


@pytest.mark.parametrize("text", ["", "model,site\n", "model,site,kind,M,K,N\n"])
def test_files_without_shapes_are_refused(tmp_path, text):
    file = tmp_path / "mine.csv"
    file.write_text(text)
    with pytest.raises(DataRefused, match=r"mine\.csv has no"):
        read_shapes(file)
    with pytest.raises(DataRefused, match="cannot read"):
        read_shapes(tmp_path / "absent.csv")


def test_models_are_chosen_by_pattern():
    shapes = lrm_gemm_shapes()
    assert {s.model for s in of_models(shapes, ["wukong-2*", "LoKA-anchor"])} == {
        "LoKA-anchor",
        "Wukong-2GF",
        "Wukong-22GF",
    }
    assert of_models(shapes, []) == shapes
    with pytest.raises(UnknownName, match="MLPerf-DLRMv1-dot"):
        of_models(shapes, ["LoKA*", "gpt"])
