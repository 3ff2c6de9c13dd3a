"""Centring: a fixed vector is taken off the input before it is quantized, and its product put back.

    y [T, N] = Q(x - m) Q(W)^T + m W^T        x [T, K], m [K], W [N, K]

It changes nothing but what is quantized: columns whose mean is far from zero leave errors of the size of
their deviations, not of their means. m W^T is in high precision, N K multiplications a call. Gradients
follow: dW = dy^T (x - m) + (sum of dy) m^T is dy^T x, its first part quantized. The m of the least energy is
the mean of a column; it is taken where it exceeds half a standard deviation: below that it saves little, and
zeros of a sparse feature stay exact zeros.
"""

import torch

_LEAST = 0.5  # of a standard deviation


def centre_of(mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """m [K] float32 from the means and variances [K] of columns; 0 where it does not pay, or for NaN."""
    pays = mean.double().square() > _LEAST**2 * variance.double()
    return mean.float().where(pays & mean.isfinite(), 0.0)


def centre_of_rows(x: torch.Tensor) -> torch.Tensor:
    """`centre_of` the columns of x [T, K], without its rows that hold NaN or infinity; nothing waits."""
    values = x.detach().float()
    finite = values.isfinite().all(dim=1, keepdim=True)
    count = finite.sum().clamp_min(1)
    mean = values.where(finite, 0).sum(dim=0) / count
    variance = (values - mean).where(finite, 0).square().sum(dim=0) / count
    return centre_of(mean, variance)


def subtract(x: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    """x - m in the dtype of x [T, K], rounded once."""
    return (x.float() - centre).to(x.dtype)


def restore(y: torch.Tensor, centre: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y [T, N] + m W^T in the dtype of y, summed in float32."""
    with torch.autocast(y.device.type, enabled=False):
        return (y.float() + centre @ weight.float().t()).to(y.dtype)
