"""What tiles programs get, and that each is right: which kernel runs is a decision, and times are the benchmarks'."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import with_triton  # noqa: F401
from edge_programs import forward_norm, gelu, layer_norm, relu, silu
from sweeps import sweep
from test_triton_edge import all_of, check, check_outputs

from loka.kernels.edge.outputs import unwritten
from loka.kernels.edge.program import program_of
from loka.kernels.edge.triton import program_kernels as fused
from loka.kernels.edge.triton.tiles import tile_of
from loka.kernels.edge.triton.values import Code
from loka.kernels.edge.twin import run_program


def dtypes(case):
    leaves = case.leaves(16, torch.device("cpu"))
    return tuple(str(leaf.dtype).removeprefix("torch.") for leaf in leaves)


def gelu_and_bias(features):
    case = gelu(features)
    text = {**json.loads(case.program.to_text()), "sums": [case.program.gradient]}
    return replace(case, program=program_of(json.dumps(text)))


def norm_alone(features):
    """Without copies of the other GEMMs, as forward has it."""
    case = layer_norm(features)
    text = {**json.loads(case.program.to_text()), "sums": [], "transposed": None, "column": False}
    return replace(case, program=program_of(json.dumps(text)))


def tile(make, features):
    case = make(features)
    found = tile_of(Code(case.program, dtypes(case)))
    return found.warps, found.held


def test_code_that_does_much_for_a_byte_computes_no_padding():
    """768 features are three parts of one warp, where four warps hold 1,024; wider rows would not fit a warp."""
    for make in (gelu_and_bias, layer_norm):
        assert tile(make, 640) == tile(make, 768) == (1, 8)
        assert tile(make, 1280) == tile(make, 1536) == (2, 8)
        assert tile(make, 2560)[0] > 2
    assert tile(relu, 768) == (4, 16)  # waits for the memory


def test_rows_with_sums_are_few_where_their_code_does_much():
    assert tile(gelu_and_bias, 128) == (4, 32)
    assert tile(gelu_and_bias, 256) == tile(gelu_and_bias, 512) == (4, 8)
    assert tile(gelu_and_bias, 1024) == (2, 8)
    assert tile(gelu_and_bias, 2048) == tile(silu, 1024) == tile(relu, 1024) == (4, 16)
    assert tile(forward_norm, 2048) == (4, 32)
    assert tile(norm_alone, 2048) == (4, 64)


@pytest.mark.parametrize(("features", "registers"), [(128, 64), (256, 64), (512, 128), (1024, 128)])
def test_short_rows_are_transposed_in_few_registers(features, registers):
    """And in as many as longer rows, or by two kernels, where these do not hold what they need."""
    case = gelu(features)
    tried = [fused.plan_of(case.program, dtypes(case), 8192, 0, limit) for limit in fused._TURNS]
    assert [plan.registers for plan in tried] == [registers, 128, 0]
    assert [plan.turns for plan in tried] == [True, True, False]


@pytest.mark.parametrize(
    ("features", "words", "asked", "kernels"),
    [
        (48, [0], [64], 1),
        (48, [8], [64], 1),  # which cost less than half of the warps
        (48, [40, 0], [64, 128], 1),
        (48, [40, 8], [64, 128], 1),  # and less than a second kernel
        (48, [40, 40], [64, 128], 2),
        pytest.param(1056, [8], [128], 2, marks=pytest.mark.slow),
    ],
)
def test_a_kernel_that_spills_gives_way(features, words, asked, kernels, device, monkeypatch):
    """Each limit by its own compilation: one answer for both sent what fits in 128 registers to two kernels."""
    case, rows = gelu(features), 33 + sum(words)  # others each time: a GPU repeats the launches of a shape
    tried, ran = [], []

    def compiled(launch, arguments, registers):
        tried.append(registers)
        return SimpleNamespace(n_spills=words[len(tried) - 1])

    run = fused.Launch.run
    monkeypatch.setattr(fused, "INTERPRETED", False)
    monkeypatch.setattr(fused, "_SPILLED", {})
    monkeypatch.setattr(fused.Launch, "_compiled", compiled)
    monkeypatch.setattr(fused.Launch, "run", lambda launch, *args: (ran.append(launch), run(launch, *args))[1])
    monkeypatch.setitem(fused.TILE, "many", 0)
    leaves, given = all_of(case, rows, device)
    found = fused.run_program_fused(case.program, leaves, rows, *given)
    check_outputs(case.program, leaves, rows, given, found, exact=False)
    assert (tried, len(ran)) == (asked, kernels)


def test_what_is_asked_about_is_the_kernel_that_runs(device, monkeypatch):
    """Arguments of other dtypes would have it compiled a second time, and its registers told of another one."""
    asked, ran = [], []

    def compiled(launch, arguments, registers):
        asked.append([value.dtype for value in launch._values(arguments) if isinstance(value, torch.Tensor)])
        return SimpleNamespace(n_regs=64, n_spills=0, metadata=SimpleNamespace(shared=0))

    run = fused.Launch.run

    def noted(launch, arguments, *rest):
        ran.append([value.dtype for value in launch._values(arguments) if isinstance(value, torch.Tensor)])
        run(launch, arguments, *rest)

    monkeypatch.setattr(fused, "INTERPRETED", False)
    monkeypatch.setattr(fused, "_RESIDENT", {})
    monkeypatch.setattr(fused, "_SPILLED", {})
    monkeypatch.setattr(fused, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(fused.Launch, "_compiled", compiled)
    monkeypatch.setattr(fused.Launch, "run", noted)
    monkeypatch.setitem(fused.TILE, "many", 0)
    for case in (layer_norm(48), gelu(48)):  # with sums and without
        leaves, given = all_of(case, 33, device)
        fused.run_program_fused(case.program, leaves, 33, *given)
        assert asked.pop() == ran[0]
        ran.clear()
    assert not asked


def test_kernels_that_are_tried_share_the_memory_for_results(device, monkeypatch):
    """With memory of its own for each trial the first step needed all results twice."""
    made = []
    monkeypatch.setattr(fused, "unwritten", lambda *args: made.append(unwritten(*args)) or made[-1])
    monkeypatch.setattr(fused.Launch, "spilled", lambda *_: 1000)
    monkeypatch.setitem(fused.TILE, "many", 0)
    case = gelu(48)
    leaves, given = all_of(case, 33, device)
    fused.run_program_fused(case.program, leaves, 33, *given)
    assert len(made) == 1


SEVERAL = tuple(itertools.product((gelu_and_bias, layer_norm, forward_norm), (640, 768)))


@pytest.mark.parametrize(("make", "features"), sweep(SEVERAL, [(forward_norm, 640)]))
def test_rows_of_several_parts_are_right(make, features, device):
    case = make(features)
    for rows in (1, 67):
        leaves, given = all_of(case, rows, device)
        check(case, leaves, rows, given, exact=False)


@pytest.mark.parametrize(("make", "numbers"), sweep([(relu, 2), (gelu, 2), (gelu, 5)], [(relu, 2)]))
def test_of_several_scales_of_a_row_the_largest_counts(make, numbers, device):
    """By the kernel that transposes in turns, which sums over rows exclude, and by the other."""
    case = make(24)
    for rows in (33, 100):
        leaves, (scale, *given) = all_of(case, rows, device)
        several = torch.stack([scale.roll(number) for number in range(numbers)], dim=1)
        check(case, leaves, rows, (several, *given), exact=make is relu)
        tops = case.program.outputs.index("tops")
        one, other = (run_program(case.program, leaves, rows, s, *given)[tops] for s in (several.amax(1), several))
        assert torch.equal(one, other)
        several[5, 1] = torch.nan
        check(case, leaves, rows, (several, *given), exact=make is relu)
