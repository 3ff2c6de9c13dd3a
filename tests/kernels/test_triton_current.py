"""The passes for current scales against their twin, and against what the producers then write."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cases import combinations, on_gpu_or_cpu
from test_triton_producer import NORMS, Case, case, named

from loka.core import current as twin
from loka.core import producer
from loka.core.chain import Activation, Epilogue, Norm
from loka.core.producer import Parameters, empty_rounded, keep_rounded
from loka.core.recipe import Format

triton = pytest.importorskip("triton", reason="needs triton (its interpreter on a CPU)")
fused = pytest.importorskip("loka.kernels.triton.current")
ACTIVATIONS = list(Activation)
SHAPES = on_gpu_or_cpu([(37, 100), (1, 1), (5, 2000), (300, 130)], [(37, 100), (1, 1), (5, 600), (70, 130)])


def forward(c: Case, home: object = fused) -> float:
    scale = torch.zeros(4, device=c.z.device)
    name = "scale_produced" if home is twin else "scale_produced_fused"
    getattr(home, name)(c.z, c.epilogue, c.parameters, scale=scale[:1])
    assert (scale[1:] == 0).all()
    return scale[0].item()


def backward(c: Case, home: object = fused, *, real: bool = True, rounded: bool = False) -> float:
    z: torch.Tensor | producer.Rounded | None = None if c.epilogue.identity else c.z
    if rounded:
        z = empty_rounded(*c.z.shape, c.epilogue, c.z.device)
        keep_rounded(c.z, c.epilogue, z)
    units, _ = producer.row_units(c.grad, torch.zeros(1, dtype=torch.int32, device=c.z.device))
    scale = torch.zeros(1, device=c.z.device)
    name = "scale_derived" if home is twin else "scale_derived_fused"
    getattr(home, name)(c.grad, z, c.epilogue, c.parameters, scale=scale, units=units, real=real)
    return scale.item()


def implied(amax: float, largest: float = 448.0) -> float:
    return 2.0 ** min(max(math.ceil(math.log2(max(amax, 1e-45) / largest)), -100), 100)


@pytest.mark.parametrize(
    ("norm", "activation", "parameters", "shape"),
    combinations(NORMS, ACTIVATIONS, [False, True], SHAPES, together=2),
    ids=named,
)
def test_the_scale_is_the_least_that_holds_all(
    norm: Epilogue, activation: Activation, parameters: bool, shape: tuple[int, int], device: torch.device
) -> None:
    c = case(*shape, replace(norm, activation=activation), device, parameters=parameters)
    written = producer.apply_epilogue(c.z, c.epilogue, c.parameters)
    assert forward(c) == forward(c, twin) == implied(written.abs().max().item())
    for real in (True, False):
        got, expected = backward(c, real=real), backward(c, twin, real=real)
        if shape == (1, 1) and norm.norm is not Norm.NONE:
            continue  # a norm over one feature leaves nothing but rounding
        assert got == expected
    if norm.norm in (Norm.BLOCK, Norm.RMS):
        assert backward(c, rounded=True) == backward(c, twin, rounded=True)


@pytest.mark.parametrize("norm", NORMS, ids=named)
def test_what_is_not_finite_and_what_is_zero_has_no_say(norm: Epilogue, device: torch.device) -> None:
    """Rows of zeros, tiny and huge rows, and NaN and infinity in a row each."""
    c = case(21, 100, replace(norm, activation=Activation.HARD_SWISH), device)
    c.z[3], c.z[7] = 0, c.z[7] * 1e-30
    c.grad[9], c.grad[11] = 0, c.grad[11] * 1e-30
    clean = forward(c), backward(c)
    assert clean == (forward(c, twin), backward(c, twin))
    c.z[5, 70], c.z[6, 3], c.grad[2, 1], c.grad[4, 99] = math.nan, math.inf, math.nan, -math.inf
    hit = forward(c), backward(c)
    assert hit == (forward(c, twin), backward(c, twin))
    # Without the rows that were hit the maximum may be smaller, but not by much.
    assert all(one / 4 <= other <= one for one, other in zip(clean, hit, strict=True))
    c.z.fill_(math.nan), c.grad.zero_()
    assert (forward(c), backward(c)) == (2.0**-100, 2.0**-100)


@pytest.mark.parametrize("top", [448.0, 449.0, 1e-44, 3e38])
def test_the_ends_of_the_range(top: float, device: torch.device) -> None:
    """Exact at 448, one octave more beyond it, and between 2^-100 and 2^100."""
    z = torch.zeros(5, 40, device=device)
    z[4, 39] = -top
    c = Case(z, z, Epilogue(), Parameters())
    assert forward(c) == forward(c, twin) == implied(top)
    scale = torch.zeros(1, device=device)
    fused.scale_derived_fused(z, None, Epilogue(), Parameters(), scale=scale, format=Format.E5M2)
    assert scale.item() == implied(top, 57344.0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 1024), (1000, 1003), (4097, 4096), (64, 32768)])
def test_real_sizes(shape: tuple[int, int]) -> None:
    for norm in NORMS:
        c = case(*shape, replace(norm, activation=Activation.SWISH), torch.device("cuda"))
        assert forward(c) == forward(c, twin)
        assert backward(c) == backward(c, twin)
