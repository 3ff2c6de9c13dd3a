"""Generated kernels against the twin: on a GPU, and in triton's interpreter.

Where a program only selects values or multiplies by powers of two, bytes are equal: both casts round to the
nearest even. Elsewhere the two differ in float32: by the order of sums, by FMAs, by a few units in the last
place of exp, erf and division. That is far less than half a step of FP8, so that an element may cross over
to the next number of the format, and few do. Scales are the same for the seeds here: a row would have to
have its maximum within a few units in the last place of 448 times a power of two.
"""

import inspect
from unittest import mock

import pytest
import torch
import with_triton  # noqa: F401
from cases import combinations
from edge_programs import CASES, EXACT, WHOLE, Writing, block_norm, identity, layer_norm, relu, silu
from sweeps import sweep

from loka.kernels.edge.op import lying
from loka.kernels.edge.program import Kind
from loka.kernels.edge.triton import program_kernels as fused
from loka.kernels.edge.twin import evaluate, run_program

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ROWS, FEATURES = [1, 33, 100], [16, 24, 600]
COMBINED = combinations(list(CASES), ROWS, FEATURES, together=2)


def check(case, leaves, rows, given, *, exact):
    """With transposed copies by the kernel that holds rows, wherever it can, and by another."""
    for many in (0, 1 << 40):
        with mock.patch.dict(fused.TILE, many=many):
            found = fused.run_program_fused(case.program, lying(case.program, leaves, rows), rows, *given)
        check_outputs(case.program, leaves, rows, given, found, exact=exact)


def check_outputs(program, leaves, rows, given, found, *, exact):
    expected = run_program(program, leaves, rows, *given)
    assert len(found) == len(expected)
    named = dict(zip(program.outputs, expected, strict=True))
    values = evaluate(program, leaves, rows)
    for name, out, twin in zip(program.outputs, found, expected, strict=True):
        assert (out.shape, out.dtype, out.stride()) == (twin.shape, twin.dtype, twin.stride()), name
        if name in ("row", "column", "transposed"):
            check_low(name, out, twin, exact=exact)
        elif name == "integer":
            # Of a row that is not finite they mean nothing; what is no normal number is off by digits.
            step = named["step"].view(-1)
            # Triton's interpreter (3.9) reads bf16 that is no normal number three to four times as large.
            normal = step.isfinite() & ((exact and step.is_cuda) | (step > 2.0**-110))
            check_low(name, out[normal], twin[normal], exact=exact)
        elif name.startswith("sum"):
            check_sums(out, twin, values[program.sums[int(name[3:])]], rows)
        elif name.startswith("value"):
            check_values(name, out, twin, exact=exact)
        else:
            rtol = 0.0
            if name == "step" and not exact:  # a row's maximum over 127, with whatever error that has
                rtol, small = 2e-5, twin < 2.0**-110
                out, twin = out[~small], twin[~small]
            torch.testing.assert_close(out, twin, rtol=rtol, atol=0, equal_nan=True, msg=f"{name} {named}")


def check_low(name, out, twin, *, exact):
    got, wanted = out.float(), twin.float()
    assert torch.equal(torch.isnan(got), torch.isnan(wanted)), name
    got, wanted = got.nan_to_num(), wanted.nan_to_num()
    if exact:
        assert torch.equal(got, wanted), name
        return
    step = torch.maximum(torch.maximum(got.abs(), wanted.abs()) * 2.0**-3, torch.tensor(2.0**-9))
    if out.dtype == torch.int8:
        step = torch.ones_like(step)
    assert ((got - wanted).abs() <= step).all(), name
    # Crossing needs a value within some 1e-5 of the middle of a step, of which there is one in 1e4.
    assert (got != wanted).sum() <= 2 + 2e-3 * got.numel(), name


def check_sums(out, twin, value, rows):
    """Terms in another order, each with an error that is small beside the largest of its row.

    What overflows may be infinite or NaN: by an FMA, less infinities meet.
    """
    size = value.float().abs().expand(rows, -1, -1).flatten(1).amax(dim=1)
    bound = size.nan_to_num(0.0, 0.0, 0.0).double().sum() * 1e-5 + 1e-38
    finite = torch.isfinite(twin)
    assert torch.equal(torch.isfinite(out), finite)
    assert (((out - twin).abs() <= bound) | ~finite).all()


def check_values(name, out, twin, *, exact):
    """Rounded to fewer digits, a value may cross over to its neighbour."""
    one = 0.0 if exact else 4e-5 + (0.0 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps)
    torch.testing.assert_close(out.float(), twin.float(), rtol=one, atol=one, equal_nan=True, msg=name)


def nasty(case, rows, device):
    """Leaves with rows of zeros, NaN, infinity, of huge and of tiny values, each where the others are not."""
    leaves = case.leaves(rows, device, seed=3)
    for leaf, kind in zip(leaves, case.program.leaves, strict=True):
        if kind is Kind.FULL and leaf.dtype in (torch.bfloat16, torch.float32):
            for place, factor in ((0, 0.0), (1, 1e30), (2, 1e-25), (5, 1e-39), (7, 1e37)):
                leaf[place % rows] = (leaf[place % rows].float() * factor).to(leaf.dtype)
            for place, bad in ((3, float("nan")), (4, float("inf")), (32, -float("inf"))):
                leaf[place % rows, (place * 37) % case.program.features] = bad
    return leaves


def all_of(case, rows, device):
    return case.leaves(rows, device), case.given(rows, device)


@pytest.mark.parametrize(("name", "rows", "features"), sweep(COMBINED, COMBINED[::5]), ids=str)
def test_programs_match_the_twin(name, rows, features, device):
    case = CASES[name](features)
    leaves, given = all_of(case, rows, device)
    check(case, leaves, rows, given, exact=name in EXACT)


@pytest.mark.parametrize("name", sweep(CASES, list(CASES)[1::6]))
def test_rows_that_are_not_ordinary_stay_apart(name, device):
    for rows, features in ((50, 600), (64, 64)):
        case = CASES[name](features)
        leaves, given = nasty(case, rows, device), case.given(rows, device)
        check(case, leaves, rows, given, exact=name in EXACT)


@pytest.mark.parametrize("count", sweep([0, 1, 1023, 1024, 1025, 2048, 2060], [0, 1025, 2048]))
def test_the_largest_of_many_tops(count, device):
    """They are read by tiles of 1,024, the last one in part; how many there are does not depend on the rows here."""
    case = CASES["only_transposed"](16)
    leaves, (_, gradient_scale, _) = all_of(case, 33, device)
    for place in {0, count // 1024 * 1024 - 1, count - 1} - {-1}:
        for largest in (0.25, float("nan")):
            tops = torch.full((count,), 2.0**-20, device=device)
            tops[place : place + 1] = largest  # of none it is 1
            check(case, leaves, 33, (None, gradient_scale, tops), exact=True)


def test_a_row_that_is_not_finite_is_nan_bytes(device):
    case = CASES["int8-identity"](40)
    (x,) = case.leaves(33, device)
    x[3, 5], x[17, 0], x[32, 39] = float("nan"), float("inf"), -float("inf")
    row, column, r, tops, _, step, *_ = fused.run_program_fused(case.program, [x], 33, None, None, None)
    bad = torch.zeros(33, dtype=torch.bool, device=device)
    bad[[3, 17, 32]] = True
    for scale in (r, step):
        assert torch.equal(torch.isnan(scale.view(-1)), bad)
    assert torch.isnan(tops).all()
    for copy in (row.view(torch.uint8)[:, :40], column.view(torch.uint8)[:40, :33].t()):
        assert ((copy[bad] & 0x7F) == 0x7F).all()
        assert ((copy[~bad] & 0x7F) != 0x7F).all()
    assert (row.view(torch.uint8)[:, 40:] == 0).all()
    assert (column.view(torch.uint8)[40:] == 0).all()
    assert (column.view(torch.uint8)[:, 33:] == 0).all()


def test_units_and_tops_that_are_not_numbers_show(device):
    case = CASES["only_transposed"](32)
    leaves, (_, gradient_scale, tops) = all_of(case, 70, device)
    gradient_scale[5] = float("nan")
    check(case, leaves, 70, (None, gradient_scale, tops), exact=True)
    tops[0] = float("nan")
    transposed, top = fused.run_program_fused(case.program, leaves, 70, None, gradient_scale, tops)
    assert torch.isnan(top).all()
    assert torch.isnan(transposed.float()[:32, :70]).all()


@pytest.mark.parametrize("name", ["identity", "only_transposed"])
def test_casts_round_to_the_nearest_even(name, device):
    """All numbers of the format, the middles between them, and what lies next to those on both sides."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    above, below = (torch.nextafter(middles, torch.tensor(limit)) for limit in (1e9, -1e9))
    values = torch.cat([numbers, middles, above, below])
    values = torch.cat([values, -values, values.new_zeros(-2 * len(values) % 16)])
    x = values.repeat(37, 1).to(device)
    w = Writing(x.shape[1])
    w.leaf(dtype=torch.float32)
    case = w.done(gradient=0) if name == "identity" else w.done(transposed=0)
    ones = torch.ones(37, device=device)
    check(case, [x], 37, (None, ones, ones[:2]), exact=True)


@pytest.mark.parametrize("scales", [0, 1, 2])
def test_the_scales_of_the_input_enter_the_maxima(scales, device):
    case = identity(32)
    leaves, (scale, _, _) = all_of(case, 70, device)
    assert scale is not None
    given = None if scales == 0 else scale[:1] if scales == 1 else scale
    check(case, leaves, 70, (given, None, None), exact=True)


def test_leaves_may_lie_apart(device):
    """Columns of a wider matrix, every other row, one row for all: strides of their own."""
    case = silu(48)
    (dy, y, bias), given = all_of(case, 40, device)
    wide = torch.zeros(80, 96, dtype=dy.dtype, device=device)
    wide[::2, 8:56] = dy
    check(case, [wide[::2, 8:56], y, bias], 40, given, exact=False)
    check(case, [dy, y[:1].expand(40, 48), bias], 40, given, exact=False)
    check(case, [dy, y.t().contiguous().t(), bias], 40, given, exact=False)
    check(case, [dy.view(8, 5, 48), y, bias.repeat_interleave(2)[::2]], 40, given, exact=False)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bool, torch.uint8, torch.float64]
)
@pytest.mark.parametrize("kind", sweep(WHOLE, (Kind.FULL, Kind.BLOCK)))
def test_leaves_of_all_dtypes_and_kinds(kind, dtype, device):
    w = Writing(24, block=8)
    x, other = w.leaf(dtype=torch.float32), w.leaf(kind, dtype)
    chosen = w.step("where", other, x, 0.0)
    case = w.done(gradient=chosen, sums=(other,))
    leaves = case.leaves(33, device)
    leaves[1] = (torch.arange(leaves[1].numel(), device=device) % 7).view(leaves[1].shape).to(dtype)
    check(case, leaves, 33, (None, None, None), exact=True)


@pytest.mark.parametrize("kind", sweep((Kind.ROW, Kind.COLUMN, Kind.BLOCK, Kind.SCALAR), (Kind.COLUMN,)))
def test_results_need_not_be_elements(kind, device):
    """Copies and sums of what is one number for several elements, as the gradient of a mean is.

    Sums of small integers are exact in any order; of others they differ in the last place.
    """
    w = Writing(24, block=8)
    x = w.leaf(kind, torch.float32)
    case = w.done(gradient=x, transposed=x, sums=(x,))
    for rows in (33, 256):
        (leaf,), given = all_of(case, rows, device)
        check(case, [leaf], rows, given, exact=True)
        leaf = (torch.arange(leaf.numel(), device=device) % 7 - 2).view(leaf.shape).float()
        check(case, [leaf], rows, given, exact=True)
        found = fused.run_program_fused(case.program, [leaf], rows, *given)
        expected = run_program(case.program, [leaf], rows, *given)
        sums = case.program.outputs.index("sum0")
        assert torch.equal(found[sums], expected[sums])


@pytest.mark.parametrize(("features", "stages"), [(1024, 3), (8192, 2), (16384, 1)])
def test_what_is_read_ahead_fits_into_memory(features, stages):
    """A kernel that asks for more than a multiprocessor has would not start."""
    w = Writing(features)
    places = [w.leaf(dtype=torch.float32) for _ in range(4)]
    program = w.done(sums=tuple(places)).program
    plan = fused.plan_of(program, ("float32",) * 4, 4096, 0, 0)
    assert f"num_stages={stages})" in inspect.getsource(plan.rows.kernel.fn)


def test_every_number_of_an_fp8_leaf_is_read(device):
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        x = torch.arange(256, dtype=torch.uint8).view(16, 16).view(dtype).to(device)
        case = identity(16, dtype)
        check(case, [x], 16, (None, None, None), exact=True)


@pytest.mark.parametrize("block", sweep([4, 5, 8, 30, 120, 300, 600], []))
def test_blocks_of_all_sizes(block, device):
    case = block_norm(600, block)
    leaves, given = all_of(case, 33, device)
    check(case, leaves, 33, given, exact=False)


@pytest.mark.slow  # by the interpreter; the default tile is in every test here
@pytest.mark.parametrize(
    "tile",
    [
        {"warps": 1, "vector": 1},
        {"held": 64, "walkers": 2, "stages": 1},
        {"direct": 0, "walkers": 1, "warps": 1, "vector": 4},
        {"high": 64, "wide": 32},
        {"high": 256, "wide": 16, "direct": 8},
        {"turns": 4, "vector": 1},
    ],
    ids=str,
)
def test_tiles_change_nothing(tile, device, monkeypatch):
    for key, value in tile.items():
        monkeypatch.setitem(fused.TILE, key, value)
    for case, exact in ((relu(80), True), (layer_norm(80), False), (block_norm(128, 64), False)):
        for rows in (33, 128, 300):
            leaves, given = all_of(case, rows, device)
            check(case, leaves, rows, given, exact=exact)


def test_every_step_does_what_pytorch_does(device):
    """On values where steps have edges of their own: zeros, infinities, NaN, overflow, tiny ones."""
    special = [0.0, -0.0, 1.0, -1.0, 0.5, 3.0, 1e-30, -1e-30, 100.0, -100.0, 1e30, -1e30]
    special += [float("inf"), -float("inf"), float("nan"), 0.62, 0.63, -0.3, 20.0, -20.0, 1e-3]
    x = torch.tensor(special, device=device)
    a, b = x.repeat_interleave(len(x)), x.repeat(len(x))
    count = -(-len(a) // 16) * 16
    a, b = (torch.nn.functional.pad(v, (0, count - len(v))).view(-1, 16) for v in (a, b))
    unary = ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "erf", "relu",
             "square", "copy", "not", "hardswish", "normal_cdf")  # fmt: skip
    binary = ("add", "sub", "mul", "div", "maximum", "minimum", "le", "lt", "ge", "gt", "eq", "ne", "and",
              "or")  # fmt: skip
    steps = [(op, (0,)) for op in unary]
    steps += [(op, args) for op in binary for args in ((0, 1), (0, 0.5), (0.5, 0))]
    steps += [("maximum", (0, float("nan"))), ("mul", (0, 1e-42)), ("add", (0, -float("inf")))]
    steps += [("where", (0, 1, 2.0)), ("where", (0, 1.0, 0.0)), ("add", (1.0, 2.0)), ("exp", (1.0,))]
    w = Writing(16)
    first, second = w.leaf(dtype=torch.float32), w.leaf(dtype=torch.float32)
    yes = w.leaf(Kind.COLUMN, torch.bool)
    assert (first, second) == (0, 1)
    case = w.done(values=tuple(w.step("where", yes, w.step(op, *args), 0.0) for op, args in steps))
    leaves = [a, b, torch.ones(len(a), dtype=torch.bool, device=device)]
    found = fused.run_program_fused(case.program, leaves, len(a), None, None, None)
    expected = run_program(case.program, leaves, len(a), None, None, None)
    for (op, args), out, twin in zip(steps, found, expected, strict=True):
        # 2e-6 is 16 units in the last place; what is below 1e-37 may be lost as no normal number.
        torch.testing.assert_close(
            out, twin, rtol=2e-6, atol=1e-37, equal_nan=True, msg=lambda m, op=op, args=args: f"{op}{args}: {m}"
        )


def test_bytes_less_any_number(device):
    """What has no room beside 2^15 is taken off in float32."""
    w = Writing(16)
    byte = w.leaf(dtype=torch.uint8)
    case = w.done(values=tuple(w.step("sub", byte, less) for less in (127.5, 0.001, -2.0, 300.0)))
    check(case, [torch.arange(256, dtype=torch.uint8, device=device).view(16, 16)], 16, (None, None, None), exact=True)


def test_booleans_count_as_pytorch_has_them(device):
    """Sums and products of two booleans are booleans; with a float they are numbers."""
    for op in ("add", "mul", "maximum", "minimum", "and", "or", "eq", "lt", "div"):
        w = Writing(16)
        x, y = w.leaf(dtype=torch.bool), w.leaf(dtype=torch.bool)
        both = w.step(op, x, y)
        kept = w.step("where", both, x, w.step("not", y))
        case = w.done(gradient=w.step("add", both, kept), sums=(both, kept, w.step("add", both, 1.0)))
        leaves, given = all_of(case, 33, device)
        check(case, leaves, 33, given, exact=op != "div")


def test_equal_programs_share_a_kernel_and_its_text_is_a_source(device):
    plans = []
    for _ in range(2):
        case = silu(32)
        dtypes = ("bfloat16", "bfloat16", "float32")
        plans.append(fused.plan_of(case.program, dtypes, 64, 0, 0))
    assert plans[0].rows.kernel is plans[1].rows.kernel
    assert plans[0].tall.kernel is plans[1].tall.kernel
    for launch in (plans[0].rows, plans[0].tall):
        assert inspect.getsource(launch.kernel.fn).startswith("@triton.jit")


@pytest.mark.parametrize("name", list(CASES))
def test_no_rows_launch_nothing(name, device):
    case = CASES[name](24)
    leaves, given = all_of(case, 0, device)
    found = fused.run_program_fused(case.program, leaves, 0, *given)
    expected = run_program(case.program, leaves, 0, *given)
    assert [f.shape for f in found] == [e.shape for e in expected]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 1024), (4100, 2048), (1000, 3456), (300, 512), (8191, 136)])
@pytest.mark.parametrize("name", list(CASES))
def test_large_shapes_on_the_gpu(name, shape):
    rows, features = shape
    case = CASES[name](features)
    leaves, given = all_of(case, rows, torch.device("cuda"))
    check(case, leaves, rows, given, exact=name in EXACT)


@pytest.mark.gpu
def test_offsets_beyond_32_bits_on_the_gpu():
    case = identity(4096)
    rows = 2**31 // 4096 + 100
    x = torch.zeros(rows, 4096, dtype=torch.bfloat16, device="cuda")
    x[-1], x[0, 7] = 3.0, 448.0
    row, column, r, _, _ = fused.run_program_fused(case.program, [x], rows, None, None, None)
    assert r[-1].item() == 2.0**-7
    assert (row[-1].float() == 384).all()
    assert (column.view(torch.uint8)[:, rows - 1] == row.view(torch.uint8)[-1]).all()
    assert column[7, 0].float().item() == 448


@pytest.mark.parametrize("name", sweep(["relu", "block_norm", "int8-forward_norm"], ["relu"]))
def test_a_second_call_computes_with_its_own_tensors(name, device):
    """On a GPU its allocations and launches are those of the first call, made again."""
    case = CASES[name](64)
    for seed in (0, 1, 2):
        leaves, given = case.leaves(48, device, seed), case.given(48, device, seed)
        check(case, leaves, 48, given, exact=name in EXACT)
        held = leaves  # so that the next ones lie elsewhere
    assert held


def test_one_tensor_in_two_places_is_not_taken_for_two(device):
    w = Writing(32)
    a, b = w.leaf(), w.leaf()
    case = w.done(gradient=w.step("sub", a, b))
    x, y = (leaf.to(device) for leaf in case.leaves(20, torch.device("cpu")))
    for leaves in ([x, x], [x, y], [y, x], [y, y]):
        check(case, leaves, 20, (None, None, None), exact=True)
