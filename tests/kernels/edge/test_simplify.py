"""Programs of fewer operations have the values of those they stand for (kernels/edge/triton/simplify.py)."""

import pytest
import torch
import with_triton  # noqa: F401
from edge_programs import CASES, WHOLE, Writing, gelu, silu
from hypothesis import given, reject
from hypothesis import strategies as st

from loka.kernels.edge import twin
from loka.kernels.edge.program import Kind, Step
from loka.kernels.edge.triton import program_kernels as fused
from loka.kernels.edge.triton.simplify import simplified

ROWS, FEATURES = 6, 12
CONSTANTS = (0.5, 2.0, -1.0, 1 / 3, 6.0, 1.0, 0.0, 3.0, 0.7071067811865476, 1e-6, 3e7)
UNARY = ("neg", "abs", "sigmoid", "tanh", "erf", "relu", "square", "not", "copy", "reciprocal")
BINARY = ("add", "sub", "mul", "mul", "mul", "div", "maximum", "minimum", "lt", "and", "or")


def swish(w, x):
    """x / (1 + exp(-x)), as aten's SiLU is decomposed."""
    power = w.step("exp", w.step("neg", x))
    return w.step("div", x, w.step("add", power, 1.0))


def hardswish(w, x, last="div"):
    above = w.step("maximum", w.step("add", x, 3.0), 0.0)
    product = w.step("mul", x, w.step("minimum", above, 6.0))
    return w.step(last, product, 6.0 if last == "div" else 1 / 6)


def forward_gelu(w, x):
    whole = w.step("add", w.step("erf", w.step("mul", x, 0.7071067811865476)), 1.0)
    return w.step("mul", w.step("mul", x, 0.5), whole)


def one_over(w, x):
    return w.step("reciprocal", w.step("add", 1.0, w.step("exp", w.step("neg", x))))


PATTERNS = (swish, hardswish, forward_gelu, one_over)


@st.composite
def cases(draw):
    """Programs of any steps and of patterns that have rules, some of whose parts others read too."""
    w = Writing(FEATURES, block=4)
    w.leaf()
    for _ in range(draw(st.integers(1, 4))):
        w.leaf(draw(st.sampled_from(WHOLE)), draw(st.sampled_from((torch.float32, torch.float32, torch.bool))))
    for _ in range(draw(st.integers(1, 9))):
        places = st.integers(0, len(w.kinds) + len(w.steps) - 1)
        if draw(st.booleans()):
            draw(st.sampled_from(PATTERNS))(w, draw(places))
        elif draw(st.integers(0, 4)) == 0:
            w.step(draw(st.sampled_from(("row_sum", "block_sum", "row_max"))), draw(places))
        elif draw(st.booleans()):
            w.step(draw(st.sampled_from(UNARY)), draw(places))
        else:
            other = draw(places | st.sampled_from(CONSTANTS))
            args = (draw(places), other) if draw(st.booleans()) else (other, draw(places))
            w.step(draw(st.sampled_from(BINARY)), *args)
    last = len(w.kinds) + len(w.steps) - 1
    picks = st.integers(0, last)
    kinds = w.done().program.kinds
    leaving = [place for place in range(last + 1) if kinds[place] not in (Kind.ROW, Kind.SCALAR)]
    values = tuple(draw(st.lists(st.sampled_from(leaving), max_size=3)))
    case = w.done(gradient=last, transposed=draw(st.none() | picks), sums=(draw(picks),), values=values)
    return case.apart(0, [5, FEATURES - 5]) if draw(st.booleans()) else case


def in_float64(program, leaves):
    """Results in order, without rounding that counts."""
    values = twin.evaluate(program, leaves, ROWS)
    outputs = (program.gradient, program.transposed, *program.sums, *program.values)
    return [None if index is None else values[index].double() for index in outputs]


@given(cases(), st.integers(0, 3))
def test_values_stay(case, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twin, "_widened", lambda leaf: leaf if leaf.dtype == torch.bool else leaf.double())
        constant = torch.full
        patch.setattr(torch, "full", lambda *args, **kwargs: constant(*args, **kwargs, dtype=torch.float64))
        leaves = case.leaves(ROWS, torch.device("cpu"), seed)
        try:
            expected = in_float64(case.program, leaves)
        except RuntimeError:  # PyTorch has no such step for booleans
            reject()
        found = in_float64(simplified(case.program), leaves)
    for out, value in zip(found, expected, strict=True):
        if value is None:
            assert out is None
            continue
        assert out.shape == value.shape
        usual = ~(value.abs() >= 1e30)  # beyond, an intermediate value may be too large in one form alone
        torch.testing.assert_close(out[usual], value[usual], rtol=1e-5, atol=1e-9, equal_nan=True)


@given(cases())
def test_it_says_the_same_of_its_results(case):
    """It may be longer: a constant that moves leaves the value behind that others read."""
    program, short = case.program, simplified(case.program)
    assert len(short.steps) <= 2 * len(program.steps)
    assert short.outputs == program.outputs
    assert short.value_dtypes == program.value_dtypes
    assert [short.kinds[v] for v in short.values] == [program.kinds[v] for v in program.values]
    assert simplified(short).outputs == program.outputs


def ops_of(case):
    return [step.op for step in simplified(case.program).steps]


def test_silu_needs_one_exponential():
    """Its gradient has the sigmoid that its value, computed again, is made of."""
    w = Writing(8)
    dy, x = w.leaf(), w.leaf()
    s = w.step("sigmoid", x)
    slope = w.step("mul", s, w.step("add", w.step("mul", x, w.step("sub", 1.0, s)), 1.0))
    case = w.done(gradient=w.step("mul", dy, slope), transposed=swish(w, x))
    ops = ops_of(case)
    assert ops.count("sigmoid") == 1
    assert not {"exp", "div", "reciprocal", "neg"} & set(ops)


@pytest.mark.parametrize("last", ["div", "mul"])
def test_hardswish_is_one_step(last):
    w = Writing(8)
    assert ops_of(w.done(gradient=hardswish(w, w.leaf(), last))) == ["hardswish"]


def test_gelu_and_its_gradient_share_the_distribution():
    w = Writing(8)
    assert ops_of(w.done(gradient=forward_gelu(w, w.leaf()))) == ["normal_cdf", "mul"]
    ops = ops_of(gelu(8))
    assert ops.count("normal_cdf") == 1
    assert "erf" not in ops


def test_constants_move_to_where_they_cost_least():
    """2 x (sum / 8) is x times a number for a row; its constants meet there."""
    w = Writing(8)
    x, scale = w.leaf(), w.leaf(Kind.COLUMN, torch.float32)
    twice = w.step("mul", x, 2.0)
    mean = w.step("div", w.step("mul", w.step("row_sum", x), scale), 8.0)
    short = simplified(w.done(gradient=w.step("mul", mean, twice)).program)
    assert [step for step in short.steps if short.kinds[len(short.leaves) + short.steps.index(step)] is Kind.FULL] == [
        Step("mul", (0, 4))
    ]
    assert Step("mul", (3, 0.25)) in short.steps


def test_what_no_rule_fits_stays():
    """Constants that might leave float32's range, clamps of something else, and truths times one."""
    w = Writing(8)
    x, y, yes = w.leaf(), w.leaf(), w.leaf(Kind.FULL, torch.bool)
    held = w.step("minimum", w.step("maximum", w.step("add", x, 3.0), 0.0), 6.0)
    kept = (
        w.step("mul", w.step("mul", x, 1e-30), 1e-30),
        w.step("mul", y, held),
        w.step("mul", yes, 1.0),
        w.step("div", x, w.step("add", w.step("exp", x), 1.0)),
    )
    case = w.done(values=kept)
    assert simplified(case.program) == case.program


def test_kernels_are_made_of_simplified_programs(monkeypatch):
    w = Writing(56)
    case = w.done(gradient=hardswish(w, w.leaf()), column=False)
    given = []
    monkeypatch.setattr(fused, "_row_kernel", lambda program, dtypes, launch: given.append(program))
    fused.plan_of(case.program, ("bfloat16",), 64, 0, 0)
    fused._plan.cache_clear()  # of what has no kernel
    assert [[step.op for step in program.steps] for program in given] == [["hardswish"]]


def test_one_value_may_be_two_results():
    program = silu(16).program
    short = simplified(program)
    assert program.sums == (program.gradient,)
    assert short.sums == (short.gradient,)


@pytest.mark.parametrize("name", list(CASES))
def test_programs_of_layers_keep_their_values(name):
    case = CASES[name](48)
    leaves = case.leaves(33, torch.device("cpu"))
    given = case.given(33, torch.device("cpu"))
    for out, value in zip(
        twin.run_program(simplified(case.program), leaves, 33, *given),
        twin.run_program(case.program, leaves, 33, *given),
        strict=True,
    ):
        # A value that rounding moves over the middle of two bytes is one step of e4m3 off, an eighth at most.
        low = out.dtype == torch.float8_e4m3fn
        torch.testing.assert_close(out.float(), value.float(), rtol=0.126 if low else 1e-4, atol=1e-4, equal_nan=True)
        assert not low or (out.float() != value.float()).float().mean() < 0.02
