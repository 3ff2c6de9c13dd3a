import pytest
from edge_programs import CASES, WHOLE
from hypothesis import given
from hypothesis import strategies as st

from loka.kernels.edge.program import (
    ARITY,
    POINTWISE,
    REDUCTIONS,
    VALUE_DTYPES,
    Kind,
    Program,
    Step,
    in_parts,
    joined,
    program_of,
)


@st.composite
def programs(draw):
    block = draw(st.integers(1, 64))
    leaves = tuple(draw(st.lists(st.sampled_from(WHOLE), min_size=1, max_size=4)))
    steps = []
    for place in range(len(leaves), len(leaves) + draw(st.integers(0, 6))):
        op = draw(st.sampled_from(POINTWISE + REDUCTIONS))
        argument = st.integers(0, place - 1)
        if op not in REDUCTIONS:
            argument = argument | st.floats(allow_nan=False, width=32)
        arguments = draw(st.lists(argument, min_size=ARITY[op], max_size=ARITY[op]))
        steps.append(Step(op, tuple(arguments)))
    value = st.integers(0, len(leaves) + len(steps) - 1)
    gradient = draw(st.none() | value)
    kinds = Program(features=block, block=block, leaves=leaves, steps=tuple(steps)).kinds
    leaving = [place for place, kind in enumerate(kinds) if kind not in (Kind.ROW, Kind.SCALAR)]
    values = tuple(draw(st.lists(st.sampled_from(leaving), max_size=3))) if leaving else ()
    program = Program(
        features=block * draw(st.integers(1, 8)),
        block=block,
        leaves=leaves,
        steps=tuple(steps),
        gradient=gradient,
        row=gradient is not None and draw(st.booleans()),
        column=gradient is not None and draw(st.booleans()),
        transposed=draw(st.none() | value),
        sums=tuple(draw(st.lists(value, max_size=3))),
        values=values,
        value_dtypes=tuple(draw(st.sampled_from(VALUE_DTYPES)) for _ in values),
    )
    matrices = [place for place, kind in enumerate(leaves) if kind is Kind.FULL]
    for leaf in reversed(matrices if program.features > 1 and draw(st.booleans()) else []):
        first = draw(st.integers(1, program.features - 1))
        program = in_parts(program, leaf, [first, program.features - first])
    return program


@given(programs())
def test_the_text_of_a_program_says_all(program):
    text = program.to_text()
    assert program_of(text) == program
    derived = program.kinds, program.columns, program.spans  # computing them changes no text, equality or hash
    assert None not in derived
    assert program.to_text() == text
    assert program_of(text) == program
    assert hash(program) == hash(program_of(text))


def test_constants_keep_their_bits_and_may_not_be_finite():
    program = Program(
        features=1,
        block=1,
        leaves=(Kind.FULL,),
        steps=(Step("where", (0, float("inf"), -float("inf"))), Step("mul", (1, 0.1)), Step("add", (2, 1e-40))),
    )
    assert program_of(program.to_text()) == program
    hidden = Program(features=1, block=1, leaves=(Kind.FULL,), steps=(Step("add", (0, float("nan"))),))
    constant = program_of(hidden.to_text()).steps[0].args[1]
    assert isinstance(constant, float)
    assert constant != constant


PARTS = {"leaves": (Kind.PART, Kind.PART), "widths": (3, 5)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": 0}, "do not divide"),
        ({"block": 3}, "do not divide"),
        ({"steps": (Step("softmax", (0,)),)}, "has no step 'softmax'"),
        ({"steps": (Step("neg", (1,)),)}, "reads what comes after it"),
        ({"steps": (Step("neg", (-1,)),)}, "reads what comes after it"),
        ({"gradient": 1}, "no value 1"),
        ({"sums": (0, 2)}, "no value 2"),
        ({"row": True}, "copies of a gradient"),
        ({"features": 8.0}, "sizes"),
        ({"features": "8"}, "sizes"),
        ({"leaves": ("full",)}, "leaves of no kind"),
        ({"steps": (Step("neg", ("x",)),)}, "what is no number"),
        ({"steps": (Step("neg", (True,)),)}, "what is no number"),
        ({"steps": (Step("add", (0,)),)}, "2 arguments"),
        ({"steps": (Step("row_max", (1.0,)),)}, "of a constant"),
        ({"gradient": "0"}, "an index that is no integer"),
        ({"gradient": 0, "row": "yes"}, "booleans"),
        ({"values": (0,)}, "dtypes"),
        ({"values": (0,), "value_dtypes": ("float64",)}, "dtypes"),
        ({"steps": (Step("concat", (0,)),)}, "of parts, or of none"),
        ({**PARTS, "steps": (Step("add", (0, 1)),)}, "of parts, or of none"),
        ({**PARTS, "widths": (4, 4), "steps": (Step("concat", (0, 0)),)}, "read twice"),
        ({**PARTS, "steps": (Step("concat", (0, 1)), Step("concat", (1, 0)))}, "read twice"),
        ({**PARTS, "steps": (Step("concat", (1,)),)}, "of 5 columns for 8"),
        ({**PARTS, "steps": (Step("concat", (0, 1, 2.0)),)}, "of other than parts"),
        ({**PARTS, "widths": (3, 6), "steps": (Step("concat", (0, 1)),)}, "of 9 columns for 8"),
        ({**PARTS, "widths": (3,)}, "of 2 parts"),
        ({"widths": (8,)}, "of 0 parts"),
        ({**PARTS, "widths": (8, 0)}, "widths"),
        ({**PARTS, "widths": (3, 5.0)}, "widths"),
        ({**PARTS, "gradient": 0}, "a part, 0, as a result"),
        ({"values": (1,), "value_dtypes": ("float32",), "leaves": (Kind.FULL, Kind.ROW)}, "cannot leave"),
    ],
)
def test_what_makes_no_program_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Program(**{"features": 8, "block": 8, "leaves": (Kind.FULL,), **changes})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"steps":[],"leaves":["round"]}', '{"steps":[[1]]}', "[1]"])
def test_other_text_is_no_program(text):
    with pytest.raises((ValueError, LookupError, TypeError)):
        program_of(text)


def test_a_place_is_no_constant():
    """0 == 0.0 in Python: gradients of both sides of a `where` were one step."""
    steps = {Step("where", args) for args in ((1, 0, 0.0), (1, 0.0, 0), (1, -0.0, 0), (1, 0, 0.0))}
    assert len(steps) == 3


def test_kinds_join_to_what_holds_both():
    full, row, column, block, scalar = Kind.FULL, Kind.ROW, Kind.COLUMN, Kind.BLOCK, Kind.SCALAR
    for one, other, both in [
        (full, scalar, full),
        (row, scalar, row),
        (row, column, full),
        (row, block, full),
        (column, block, block),
        (column, scalar, column),
        (scalar, scalar, scalar),
    ]:
        assert joined([one, other]) == joined([other, one]) == both
    assert joined([]) == scalar


def test_sums_are_numbers_for_rows_and_blocks():
    program = Program(features=8, block=4, leaves=(Kind.FULL,), steps=(Step("row_sum", (0,)), Step("block_sum", (0,))))
    assert program.kinds == (Kind.FULL, Kind.COLUMN, Kind.BLOCK)


def test_outputs_come_in_one_order():
    program = CASES["silu"](24).program
    assert program.outputs == ("row", "column", "r", "tops", "transposed", "top", "sum0")
    assert CASES["only_transposed"](24).program.outputs == ("transposed", "top")
    forward = CASES["forward_norm"](24).program
    assert forward.outputs == ("row", "r", "value0", "value1", "value2")
