"""What tiles programs get, and that each is right: which kernel runs is a decision, and times are the benchmarks'."""

import json

import pytest
import torch
import with_triton  # noqa: F401
from edge_programs import forward_norm, layer_norm, relu, silu
from test_triton_edge import all_of, check, check_outputs

from loka.kernels.edge.program import program_of
from loka.kernels.edge.triton import program_kernels as fused
from loka.kernels.edge.triton.tiles import tile_of
from loka.kernels.edge.triton.values import Code


def dtypes(case):
    leaves = case.leaves(16, torch.device("cpu"))
    return tuple(str(leaf.dtype).removeprefix("torch.") for leaf in leaves)


def without_sums(case):
    return program_of(json.dumps({**json.loads(case.program.to_text()), "sums": []}))


def tile(make, features):
    case = make(features)
    found = tile_of(Code(case.program, dtypes(case)))
    return found.warps, found.held


def test_code_that_does_much_for_a_byte_computes_no_padding():
    """768 features are three parts of one warp, where four warps hold 1,024; wider rows would not fit a warp."""
    for make in (silu, layer_norm):
        assert tile(make, 640) == tile(make, 768) == (1, 8)
        assert tile(make, 1280) == tile(make, 1536) == (2, 8)
        assert tile(make, 2560)[0] > 2
    assert tile(relu, 768) == (4, 16)  # waits for the memory


def test_rows_with_sums_are_few_where_their_code_does_much():
    assert tile(silu, 128) == (4, 32)
    assert tile(silu, 256) == tile(silu, 512) == (4, 8)
    assert tile(silu, 1024) == (2, 8)
    assert tile(silu, 2048) == tile(relu, 1024) == (4, 16)
    assert tile(forward_norm, 2048) == (4, 64)


@pytest.mark.parametrize(("features", "registers"), [(128, 64), (256, 64), (512, 128), (1024, 128)])
def test_short_rows_are_transposed_in_few_registers(features, registers):
    """And in as many as longer rows, or by two kernels, where these do not hold what they need."""
    case = silu(features)
    program = without_sums(case)
    tried = [fused.plan_of(program, dtypes(case), 8192, 0, limit) for limit in fused._TURNS]
    assert [plan.registers for plan in tried] == [registers, 128, 0]
    assert [plan.turns for plan in tried] == [True, True, False]


@pytest.mark.parametrize("spilling", [0, 1, 2])
def test_a_kernel_that_spills_gives_way(spilling, device, monkeypatch):
    case = silu(48)
    program = without_sums(case)
    asked, ran = [], []

    def spills(launch, arguments, registers):
        asked.append(registers)
        return len(asked) <= spilling

    run = fused.Launch.run
    monkeypatch.setattr(fused.Launch, "spills", spills)
    monkeypatch.setattr(fused.Launch, "run", lambda launch, *args: (ran.append(launch), run(launch, *args))[1])
    monkeypatch.setitem(fused.TILE, "many", 0)
    leaves, given = all_of(case, 33, device)
    found = fused.run_program_fused(program, leaves, 33, *given)
    check_outputs(program, leaves, 33, given, found, exact=False)
    assert asked == [64, 128][: spilling + 1]
    assert len(ran) == (2 if spilling == 2 else 1)


@pytest.mark.parametrize("features", [640, 768])
@pytest.mark.parametrize("make", [silu, layer_norm, forward_norm])
def test_rows_of_several_parts_are_right(make, features, device):
    case = make(features)
    for rows in (1, 67):
        leaves, given = all_of(case, rows, device)
        check(case, leaves, rows, given, exact=False)
