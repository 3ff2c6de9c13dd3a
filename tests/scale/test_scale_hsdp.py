import pytest
from networks import across, network, row, tower

from loka.core.exceptions import LokaError, UnknownName


@pytest.mark.slow
def test_hsdp_sends_between_nodes_what_a_card_holds():
    """Where nodes are far apart HSDP's wire is an eighth of the gradients in bf16, twice, to 7 of 8 nodes."""
    model = tower()
    n = sum(p.numel() for p in model.parameters())
    far = network(inside=(1e-6, 1e6), between=(1e-6, 0.05), launch=1e-6, memory=1e9)
    found = across(model, network=far, groups=(8, 16))
    assert [r.engine for r in found.rows if r.plain and r.gpus == 64] == ["ddp", "fsdp2", "hsdp/8", "hsdp/16"]
    assert {r.engine for r in found.rows if r.gpus == 8} == {"ddp", "fsdp2"}
    flat, node, two = (row(found, 64, name, "bf16").bf16_parts for name in ("fsdp2", "hsdp/8", "hsdp/16"))
    assert node.wire == pytest.approx(2 * 2 * n / 8 * 7 / 8 / 50, rel=1e-3)
    assert node.wire < min(two.wire, flat.wire / 1.2)
    assert node.sent == pytest.approx(flat.sent + 2 * n / 8, rel=1e-3)
    assert found.memory["64 hsdp/8"]["parameters"] == pytest.approx(4 * n / 8)
    assert {r.engine for r in across(model, engines=("hsdp",), gpus=(16,)).rows} == {"hsdp/8"}
    assert any("hsdp/N: FSDP2 in each N GPUs" in note for note in found.notes)


def test_engines_that_there_are():
    for options in ({"engines": ("fsdp",)}, {"engines": ("ddp",), "groups": (8,)}):
        with pytest.raises(UnknownName, match="of ddp, fsdp2, hsdp; groups are for hsdp alone"):
            across(**options)
    with pytest.raises(LokaError, match="one of 2, 4, 8, 16, 32"):
        across(groups=(12,))
    with pytest.raises(LokaError, match="--group 8 on 8 GPUs in nodes of 8"):
        across(engines=("hsdp",), gpus=(8,))
