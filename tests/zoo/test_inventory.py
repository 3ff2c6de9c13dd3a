import functools
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from loka.core.exceptions import UnknownName
from loka.zoo import inventory, presets
from loka.zoo.inventory import Features, linear_gemms
from loka.zoo.shapes import lrm_gemm_shapes

Gemms = Counter[tuple[int, int, int]]


def of(pairs, rows):
    return Counter((rows, k, n) for k, n in pairs)


# What the suite has otherwise than its source: FuxiCTR's [512, 256] are two hidden layers of an FMB's MLP, of
# which it has one; the head of "InterFormer-like", whose sizes it assumes, reads X in place of X_sum.
MISREAD = {"wukong:fuxictr": of([(512, 2560)] * 3, 8192), "interformer:paper": of([(5120, 1024)], 4096)}
# The suite's name, the preset, the batch, and the linear layers of the model that the suite leaves out.
PUBLISHED = [
    ("MLPerf-DLRM-DCNv2", "dcnv2:mlperf", 8192, Gemms()),
    ("MLPerf-DLRMv1-dot", "dlrm:mlperf", 2048, of([(13, 512), (512, 256), (256, 128)], 2048)),
    ("BARS-DCNv2-criteo_x1", "dcnv2:bars", 4096, of([(890, 1)], 4096)),
    *(
        (
            f"Wukong-{size.upper()}",
            f"wukong:{size}",
            batch,
            of([(13, 512), (512, 256), (256, 160), (512, 1)], batch)
            # The suite has X^T Y as a product without weights, here Y is a Linear; and it leaves out R.
            + of([(770, rank), (770, 2 * tokens)], 160 * batch)
            + Counter({(160 * batch, 2 * tokens, rank): layers - 1}),
        )
        for size, batch, layers, tokens, rank in [
            ("0.5gf", 6144, 2, 8, 24),
            ("2gf", 6144, 8, 32, 24),
            ("22gf", 6144, 8, 96, 96),
            ("108gf", 2048, 8, 192, 192),
        ]
    ),
    (
        "FuxiCTR-WuKong-default(criteo39)",
        "wukong:fuxictr",
        8192,
        of([(256, 1)] + [(512, 256), (256, 2560)] * 3, 8192) + of([(39, 80), (39, 8), (80, 8), (80, 8)], 64 * 8192),
    ),
    (
        "TorchEasyRec-wukong_criteo",
        "wukong:torcheasyrec",
        8192,
        of([(13, 512), (512, 256), (256, 16), (64, 1)], 8192) + of([(27, 32), (27, 24), (32, 24)], 16 * 8192),
    ),
    (
        "NVIDIA-HSTU-bench",
        "hstu:nvidia",
        32,
        # The suite's head reads 8192 targets of 32 users, ours one target of each.
        of([(1024, 512), (512, 1)], 32) + of([(128, 1024)], 131168),
    ),
    (
        "InterFormer-like",
        "interformer:paper",
        4096,
        # The dense MLP; the head over X_sum and S_sum, and the logit.
        of([(13, 512), (512, 256), (256, 160), (1920, 1024), (128, 1)], 4096)
        # Dots and crosses over 27 tokens and 8 of S_sum; the MLP after.
        + of([(496, 2560), (5600, 512), (512, 5600), (5120, 2048), (2048, 4320)] * 3, 4096)
        # Maps over tokens: X_sum, the dots' compression, the crosses' W_m and the shortcuts.
        + of([(27, 4)] * 4 + [(35, 32), (35, 16), (35, 32)] * 3, 160 * 4096)
        # MaskNet, attention's output and PMA; gates of X_sum and of S_sum, each once more before the head.
        + of([(160, 160)] * 3, 596 * 4096)
        + of([(160, 160)] * 3 + [(160, 320)] * 4, 600 * 4096)
        + of([(160, 160)] * 4, 2 * 4096)
        + of([(160, 160)] * 4, 4 * 4096)
        + of([(160, 160)] * 4, 8 * 4096),
    ),
    ("DLRMv3-HSTU", "hstu:dlrmv3", 64, of([(512, 512), (512, 1)], 64)),
    ("KuaiRand-1K-HSTU", "hstu:kuairand", 8, of([(512, 512), (512, 1)], 8) + of([(512, 512)] * 3, 32768)),
]


BATCH = {**{preset: batch for _, preset, batch, _ in PUBLISHED}, "dhen:elfm": 2048}


@functools.cache
def looked_at(preset):
    name, _, size = preset.partition(":")
    return inventory(name, size, batch=BATCH.get(preset, 3))


@pytest.mark.parametrize(("suite", "preset", "batch", "rest"), PUBLISHED, ids=[p[1] for p in PUBLISHED])
def test_published_sizes_have_the_published_gemms(suite, preset, batch, rest):
    told = Gemms()
    for shape in lrm_gemm_shapes():
        if shape.model == suite and shape.kind == "linear":
            told[shape.m, shape.k, shape.n] += shape.count
    if suite == "NVIDIA-HSTU-bench":
        assert told.pop((8192, 1024, 512)) == 1
    assert MISREAD.get(preset, Gemms()) <= told
    told -= MISREAD.get(preset, Gemms())
    found = looked_at(preset)
    assert Counter({(g.m, g.k, g.n): g.count for g in found.gemms}) == told + rest
    # Weights of the GEMMs above; what remains is biases, norms and a few vectors.
    weights = sum(count * k * n for (_, k, n), count in (told + rest).items())
    assert weights <= found.parameters < 1.02 * weights


def test_the_composite_has_both_published_shapes_of_the_external_large_fm():
    found = {(g.m, g.k, g.n) for g in looked_at("dhen:elfm").gemms}
    anchors = [(s.m, s.k, s.n) for s in lrm_gemm_shapes() if s.model == "LoKA-anchor"]
    assert len(anchors) == 2
    assert found.issuperset(anchors)


def test_flop_are_those_of_the_products():
    """DLRM: its Linears, and the dots of 27 tokens of 128."""
    found = looked_at("dlrm:mlperf")
    products = sum(g.count * g.m * g.k * g.n for g in found.gemms) / 2048 + 27 * 128 * 27
    assert found.gflop == pytest.approx(2e-9 * products, rel=1e-12)


def test_linears_are_noted_call_by_call():
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Linear(3, 5), nn.Linear(5, 3), shared)
    found = linear_gemms(model, torch.zeros(4, 2, 3))
    assert [(g.m, g.k, g.n) for g in found] == [(8, 3, 3), (8, 3, 5), (8, 5, 3), (8, 3, 3)]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_features_can_be_others():
    usual, none = looked_at("hstu:small"), inventory("hstu", features=Features(dense=0, sparse=2, events=5))
    # A batch of 3. 27 features and the target; 1 feature of context, 5 events and the target.
    assert (usual.gemms[2].m, none.gemms[1].m) == (3 * 28, 7)
    with pytest.raises(UnknownName, match="hstu: small"):
        inventory("hstu", "huge")


def test_the_page_tells_the_truth():
    """docs/zoo.md has a line for each preset, with parameters and GFLOP as counted here."""
    page = (Path(__file__).parents[2] / "docs" / "zoo.md").read_text()
    lines = re.findall(r"^\| `(\w+):([\w.]+)` \|(.*)\|$", page, flags=re.M)
    assert [(name, size) for name, size, _ in lines] == list(presets())
    for name, size, rest in lines:
        found = looked_at(f"{name}:{size}")
        features = found.features
        row = f"{features.dense} + {features.sparse}" + (f", {features.events}" if features.events else "")
        assert [cell.strip() for cell in rest.split("|")][:3] == [row, f"{found.parameters:,}", f"{found.gflop:.3g}"], (
            name,
            size,
        )
