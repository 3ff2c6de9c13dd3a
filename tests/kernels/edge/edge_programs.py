"""Programs as layers between two FP8 GEMMs need them, with leaves to run them on."""

from dataclasses import dataclass, field, replace

import torch

from loka.kernels.edge.program import GROUP, Argument, Kind, Program, Step, in_parts

WHOLE = [kind for kind in Kind if kind is not Kind.PART]


@dataclass
class Writing:
    """A program as it is written down: `leaf` and `step` return places."""

    features: int
    block: int = 0
    kinds: list[Kind] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    steps: list[tuple[str, tuple[Argument | str, ...]]] = field(default_factory=list)

    def leaf(self, kind=Kind.FULL, dtype=torch.bfloat16):
        assert not self.steps, "leaves come first"
        self.kinds.append(kind)
        self.dtypes.append(dtype)
        return len(self.kinds) - 1

    def step(self, op, *args):
        self.steps.append((op, args))
        return len(self.kinds) + len(self.steps) - 1

    def done(self, gradient=None, transposed=None, sums=(), row=True, column=True, values=(), value_dtypes=None):
        program = Program(
            features=self.features,
            block=self.block or self.features,
            leaves=tuple(self.kinds),
            steps=tuple(Step(op, tuple(args)) for op, args in self.steps),
            gradient=gradient,
            row=row and gradient is not None,
            column=column and gradient is not None,
            transposed=transposed,
            sums=sums,
            values=values,
            value_dtypes=("float32",) * len(values) if value_dtypes is None else value_dtypes,
        )
        return Case(program, tuple(self.dtypes))


@dataclass(frozen=True)
class Case:
    program: Program
    dtypes: tuple[torch.dtype, ...]

    def apart(self, leaf, widths):
        """With a leaf in parts."""
        dtypes = (*self.dtypes[:leaf], *[self.dtypes[leaf]] * len(widths), *self.dtypes[leaf + 1 :])
        return Case(in_parts(self.program, leaf, widths), dtypes)

    def leaves(self, rows, device, seed=0):
        generator = torch.Generator().manual_seed(seed)
        features = self.program.features
        shapes = {
            Kind.FULL: (rows, features),
            Kind.ROW: (features,),
            Kind.COLUMN: (rows,),
            Kind.BLOCK: (rows, features // self.program.block),
            Kind.SCALAR: (),
        }
        found = []
        for index, (kind, dtype) in enumerate(zip(self.program.leaves, self.dtypes, strict=True)):
            shape = (rows, self.program.columns[index]) if kind is Kind.PART else shapes[kind]
            value = torch.randn(shape, generator=generator)
            value = value > 0 if dtype == torch.bool else value.to(dtype)
            found.append(value.to(device))
        return found

    def given(self, rows, device, seed=0):
        """input_scale, gradient_scale and tops: powers of two, no scale above the maximum of the tops."""
        generator = torch.Generator().manual_seed(seed + 1)
        scale = torch.exp2(torch.randint(-8, 4, (rows,), generator=generator).float())
        gradient_scale = torch.exp2(torch.randint(-20, -2, (rows,), generator=generator).float())
        wide = torch.zeros(-(-rows // GROUP) * GROUP)
        wide[:rows] = gradient_scale
        return scale.to(device), gradient_scale.to(device), wide.view(-1, GROUP).amax(dim=1).to(device)


def identity(features, dtype=torch.bfloat16):
    """One tensor, both copies: no arithmetic but the cast."""
    w = Writing(features)
    x = w.leaf(dtype=dtype)
    return w.done(gradient=x, sums=(x,))


def relu(features):
    """Backward from the FP8 copy that forward kept: its zeros are the mask, and it is transposed."""
    w = Writing(features)
    dy, low, scale = w.leaf(), w.leaf(dtype=torch.float8_e4m3fn), w.leaf(Kind.COLUMN, torch.float32)
    g = w.step("where", w.step("gt", low, 0.0), dy, 0.0)
    return w.done(gradient=g, transposed=w.step("mul", low, scale), sums=(g,))


def masked(features):
    """A dropout's mask in booleans, with a constant factor."""
    w = Writing(features)
    dy, keep, other = w.leaf(), w.leaf(dtype=torch.bool), w.leaf(dtype=torch.uint8)
    both = w.step("and", keep, w.step("not", w.step("eq", other, 1.0)))
    g = w.step("mul", dy, w.step("where", both, 1.25, 0.0))
    return w.done(gradient=g, column=False, sums=(both,))


def silu(features):
    """dz = dy s (1 + z (1 - s)), s = sigmoid(z), z = y + bias; transposed is SiLU of z, computed again."""
    w = Writing(features)
    dy, y, bias = w.leaf(), w.leaf(), w.leaf(Kind.ROW, torch.float32)
    z = w.step("add", y, bias)
    s = w.step("sigmoid", z)
    slope = w.step("mul", s, w.step("add", 1.0, w.step("mul", z, w.step("sub", 1.0, s))))
    g = w.step("mul", dy, slope)
    return w.done(gradient=g, transposed=w.step("mul", z, s), sums=(g,))


def gelu(features):
    w = Writing(features)
    dy, z = w.leaf(), w.leaf(dtype=torch.float16)
    gate = w.step("mul", 0.5, w.step("add", 1.0, w.step("erf", w.step("mul", z, 0.7071067811865476))))
    bell = w.step("exp", w.step("mul", -0.5, w.step("square", z)))
    slope = w.step("add", gate, w.step("mul", z, w.step("mul", bell, 0.3989422804014327)))
    return w.done(gradient=w.step("mul", dy, slope), transposed=w.step("mul", z, gate))


def tanh(features):
    w = Writing(features)
    dy, z = w.leaf(dtype=torch.float32), w.leaf(dtype=torch.float32)
    out = w.step("tanh", z)
    return w.done(gradient=w.step("mul", dy, w.step("sub", 1.0, w.step("square", out))), transposed=out)


def layer_norm(features):
    """dx from dy, x, and what forward kept for rows; gamma's, beta's and the bias's gradients."""
    w = Writing(features)
    dy, x = w.leaf(), w.leaf()
    mean, rstd = w.leaf(Kind.COLUMN, torch.float32), w.leaf(Kind.COLUMN, torch.float32)
    gamma, beta = w.leaf(Kind.ROW), w.leaf(Kind.ROW)
    normal = w.step("mul", w.step("sub", x, mean), rstd)
    shown = w.step("mul", dy, gamma)
    weight = w.step("mul", dy, normal)
    share = 1.0 / features
    centre = w.step("mul", w.step("row_sum", shown), share)
    along = w.step("mul", w.step("row_sum", w.step("mul", shown, normal)), share)
    back = w.step("add", centre, w.step("mul", normal, along))
    g = w.step("mul", w.step("sub", shown, back), rstd)
    out = w.step("add", w.step("mul", normal, gamma), beta)
    return w.done(gradient=g, transposed=out, sums=(weight, dy, g))


def rms_norm(features):
    """As forward would compute it: its root from a sum, and the next sum from that."""
    w = Writing(features)
    dy, x, eps = w.leaf(), w.leaf(), w.leaf(Kind.SCALAR, torch.float32)
    share = 1.0 / features
    square = w.step("mul", w.step("row_sum", w.step("square", x)), share)
    rstd = w.step("rsqrt", w.step("add", square, w.step("abs", eps)))
    normal = w.step("mul", x, rstd)
    along = w.step("mul", w.step("row_sum", w.step("mul", dy, normal)), share)
    g = w.step("mul", w.step("sub", dy, w.step("mul", normal, along)), rstd)
    return w.done(gradient=g, transposed=normal)


def block_norm(features, block):
    """A norm of each block of features, then hardswish; backward of both, statistics from forward."""
    w = Writing(features, block)
    dy, x = w.leaf(), w.leaf()
    mean, rstd = w.leaf(Kind.BLOCK, torch.float32), w.leaf(Kind.BLOCK, torch.float32)
    normal = w.step("mul", w.step("sub", x, mean), rstd)
    gate = w.step("minimum", w.step("maximum", 0.0, w.step("add", w.step("div", normal, 6.0), 0.5)), 1.0)
    slope = w.step("add", w.step("div", normal, 3.0), 0.5)
    slope = w.step("where", w.step("ge", w.step("abs", normal), 3.0), gate, slope)
    shown = w.step("mul", dy, slope)
    centre = w.step("div", w.step("block_sum", shown), float(block))
    along = w.step("div", w.step("block_sum", w.step("mul", shown, normal)), float(block))
    back = w.step("add", centre, w.step("mul", normal, along))
    g = w.step("mul", w.step("sub", shown, back), rstd)
    return w.done(gradient=g, transposed=w.step("mul", normal, gate), sums=(g, shown))


def rounded_norm(features, block):
    """Backward of a root mean square over blocks and of ReLU, whose input was kept in eight bits."""
    w = Writing(features, block)
    dy, byte = w.leaf(), w.leaf(dtype=torch.uint8)
    step, inverse = w.leaf(Kind.BLOCK, torch.float32), w.leaf(Kind.BLOCK, torch.float32)
    normal = w.step("mul", w.step("mul", w.step("sub", byte, 0.5), step), inverse)
    shown = w.step("where", w.step("le", normal, 0.0), 0.0, dy)
    along = w.step("div", w.step("block_sum", w.step("mul", shown, normal)), float(block))
    g = w.step("mul", w.step("sub", shown, w.step("mul", normal, along)), inverse)
    return w.done(gradient=g, transposed=w.step("relu", normal))


def gated(features):
    """The gradient of one factor of a product: the other's is a program of its own."""
    w = Writing(features)
    dy, left, right = w.leaf(), w.leaf(), w.leaf(dtype=torch.float32)
    return w.done(gradient=w.step("mul", dy, left), transposed=w.step("mul", left, right), row=False)


def only_transposed(features):
    w = Writing(features)
    low, scale = w.leaf(dtype=torch.float8_e4m3fn), w.leaf(Kind.COLUMN, torch.float32)
    return w.done(transposed=w.step("mul", low, scale))


def only_sums(features):
    """Of values that are no elements: a sum over rows of a row's and of a feature's number."""
    w = Writing(features)
    x, a, b, s = w.leaf(), w.leaf(Kind.COLUMN), w.leaf(Kind.ROW), w.leaf(Kind.SCALAR)
    return w.done(gradient=w.step("row_sum", x), row=False, column=False, sums=(a, b, s, x))


def forward_norm(features):
    """The cast of a site's input: its norm's statistics and the sum that it is of leave for backward."""
    w = Writing(features)
    x, skipped, gamma = w.leaf(), w.leaf(), w.leaf(Kind.ROW)
    total = w.step("add", x, skipped)
    share = 1.0 / features
    mean = w.step("mul", w.step("row_sum", total), share)
    off = w.step("sub", total, mean)
    spread = w.step("mul", w.step("row_sum", w.step("square", off)), share)
    rstd = w.step("rsqrt", w.step("add", spread, 1e-5))
    normal = w.step("mul", w.step("mul", off, rstd), gamma)
    out = w.step("mul", normal, w.step("sigmoid", normal))
    dtypes = ("bfloat16", "float32", "float32")
    return w.done(gradient=out, column=False, values=(total, mean, rstd), value_dtypes=dtypes)


def forward_blocks(features, block):
    """Norms of blocks, with their statistics; and of the row its maximum."""
    w = Writing(features, block)
    x = w.leaf(dtype=torch.float16)
    mean = w.step("div", w.step("block_sum", x), float(block))
    off = w.step("sub", x, mean)
    spread = w.step("div", w.step("block_sum", w.step("square", off)), float(block))
    rstd = w.step("rsqrt", w.step("add", spread, 1e-5))
    out = w.step("mul", off, rstd)
    most = w.step("row_max", w.step("abs", x))
    low = w.step("sub", x, most)
    dtypes = ("float32", "float32", "float32", "float16")
    return w.done(gradient=out, column=False, values=(mean, rstd, most, low), value_dtypes=dtypes)


def transposed_sums(features):
    """A value to be transposed that needs sums of its rows, and nothing else."""
    w = Writing(features)
    x = w.leaf()
    return w.done(transposed=w.step("div", x, w.step("add", w.step("row_sum", w.step("square", x)), 1e-3)))


def replaced(case, **changes):
    return replace(case, program=replace(case.program, **changes))


def in_integers(case):
    """The same values, with an INT8 copy as they lie."""
    return replaced(case, integers=True)


BLOCKS = {16: 8, 24: 12, 64: 32, 600: 100, 1040: 16}

CASES = {
    "identity": identity,
    "identity-float32": lambda n: identity(n, torch.float32),
    "identity-float8": lambda n: identity(n, torch.float8_e4m3fn),
    "relu": relu,
    "masked": masked,
    "silu": silu,
    "gelu": gelu,
    "tanh": tanh,
    "rounded_norm": lambda n: rounded_norm(n, BLOCKS.get(n, n)),
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "block_norm": lambda n: block_norm(n, BLOCKS.get(n, 8 if n % 32 else 32)),
    "gated": gated,
    "only_transposed": only_transposed,
    "only_sums": only_sums,
    "forward_norm": forward_norm,
    "forward_blocks": lambda n: forward_blocks(n, BLOCKS.get(n, 8 if n % 32 else 32)),
    "transposed_sums": transposed_sums,
    "int8-identity": lambda n: in_integers(identity(n)),
    "int8-forward_norm": lambda n: in_integers(forward_norm(n)),
    "int8-alone": lambda n: in_integers(replaced(identity(n), row=False, column=False)),
}
EXACT = (
    *("identity", "identity-float32", "identity-float8", "relu", "masked", "only_transposed"),
    *("int8-identity", "int8-alone"),
)
"""No result of theirs but sums is rounded before the cast."""
