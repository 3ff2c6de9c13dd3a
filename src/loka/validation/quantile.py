"""Quantiles of Student's t at any level, for intervals that hold over many segments at once.

    P(|T| > t) = 1 - A(t | nu)       (Abramowitz and Stegun 26.7.3 and 26.7.4, theta = atan(t / sqrt(nu)))
    nu odd:   A = 2/pi (theta + sin theta (cos theta + 2/3 cos^3 theta + 2/3 4/5 cos^5 theta + ...))
    nu even:  A = sin theta (1 + 1/2 cos^2 theta + 1/2 3/4 cos^4 theta + ...)

The sums are finite and exact; beyond `_EXACT` degrees of freedom the expansion that core/error.py uses at
95 % is exact to more digits than any sample is.
"""

import functools
import math
from statistics import NormalDist

from loka.core.error import expanded_t

_EXACT = 200


def two_sided_tail(t: float, freedom: int) -> float:
    """P(|T| > t) of Student's t with `freedom` >= 1 degrees of freedom."""
    theta = math.atan2(t, math.sqrt(freedom))
    cosine, sine = math.cos(theta), math.sin(theta)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for power in range(2 + odd, freedom - 1, 2):
        term *= (power - 1) / power * cosine * cosine
        total += term
    inside = (theta + sine * total) * 2 / math.pi if odd else sine * total
    return max(1.0 - inside, 0.0)


@functools.lru_cache(maxsize=4096)
def student_t(freedom: int, tail: float) -> float:
    """t with P(|T| > t) = `tail`; infinite without degrees of freedom.

    Raises ValueError for a tail outside of (0, 1).
    """
    if not 0 < tail < 1:
        raise ValueError(f"a tail of {tail} is no share between 0 and 1")
    if freedom < 1:
        return math.inf
    if freedom > _EXACT:
        return expanded_t(NormalDist().inv_cdf(1 - tail / 2), freedom)
    low, high = 0.0, 1.0
    while two_sided_tail(high, freedom) > tail:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if two_sided_tail(middle, freedom) > tail:
            low = middle
        else:
            high = middle
    return high
