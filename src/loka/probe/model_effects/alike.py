"""Correlations of what each two layers change, from the rows of a renewal.

    r_ij(p, q)  =  sum over rows of s_i(p) s_j(q)  /  (|s_i(p)| |s_j(q)|)

s_i(p) is what layer i changes by recipe p, in the weighted logits. What correlations add to a sum of effects is
`beyond_sum` in core/records/parts.py.
"""

from collections.abc import Sequence
from itertools import combinations

import torch

from loka.core.recipe import RECIPES
from loka.core.records.parts import ANY_LAYER, REFERENCE, in_recipe
from loka.statistics.effect_casts import CASTS

LEAST = 0.1
"""The least correlation that is kept; and four standard errors of one."""
PAIRS = 20_000
_OTHERS = 20  # times fewer of each other recipe, and of each two: all of 32 layers that round one tensor

Together = dict[str, dict[str, float]]


def alike(
    paths: Sequence[str], changes: Sequence[torch.Tensor], weighing: torch.Tensor | None, pairs: int = PAIRS
) -> Together:
    """Correlations of s over rows of each two layers: in the reference recipe those that chance does not make, in
    others those that differ from these. INT8 steps of a heavy-tailed tensor agree where e4m3's do not.

    Those of two recipes are between layers that agree with another one in some recipe: steps by rows and by blocks
    agree where both have e4m3's fractions.

    Of more than `pairs`, which 200 layers have, those that say most of the joint effect; in other recipes of fewer,
    and there a line of `ANY_LAYER` says what share of the reference's correlations all others have.
    """
    found: Together = {}
    least = max(LEAST, 4 / len(changes[0]) ** 0.5)
    others = [name for name in CASTS if name in RECIPES and name != REFERENCE]
    r, sizes = _correlations(changes, (REFERENCE, REFERENCE), weighing)
    reference = _add(found, paths, (REFERENCE, REFERENCE), r.triu(1), sizes, torch.zeros_like(r), pairs, least)
    near, fewer = reference != 0, max(pairs // _OTHERS, 1)
    for recipe in others:
        r, sizes = _correlations(changes, (recipe, recipe), weighing)
        kept = _add(found, paths, (recipe, recipe), r.triu(1), sizes, reference, fewer, least, reference)
        near |= kept != 0
    at = (near | near.t()).any(0).nonzero().flatten().tolist()
    if at:
        close, of_close = [paths[index] for index in at], [changes[index] for index in at]
        of_reference = (reference + reference.t())[at][:, at]
        for both in combinations([REFERENCE, *others], 2):
            r, sizes = _correlations(of_close, both, weighing)
            r.fill_diagonal_(0)  # one layer runs one recipe
            _add(found, close, both, r, sizes, torch.zeros_like(r), fewer, least, of_reference)
    return found


def _correlations(
    changes: Sequence[torch.Tensor], recipes: tuple[str, str], weighing: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """r between each layer in the one recipe and each in the other, and the product of both sizes, [layers, layers]."""
    (one, its_size), (other, size) = (_scaled(changes, recipe, weighing) for recipe in recipes)
    return (one @ other.t()).clamp(-1, 1), its_size * size.t()


def _scaled(
    changes: Sequence[torch.Tensor], recipe: str, weighing: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Changes of length 1 [layers, rows], and the lengths [layers, 1]."""
    s = torch.stack([each[:, list(CASTS).index(recipe)] for each in changes]).double().nan_to_num(0, 0, 0)
    s = s if weighing is None else s * weighing.sqrt()
    size = s.norm(dim=1, keepdim=True)
    return s / size.clamp_min(1e-300), size


def _add(
    found: Together,
    paths: Sequence[str],
    recipes: tuple[str, str],
    r: torch.Tensor,
    sizes: torch.Tensor,
    known: torch.Tensor,
    pairs: int,
    least: float,
    reference: torch.Tensor | None = None,
) -> torch.Tensor:
    """Adds to `found` those `pairs` at most whose `r` is not `known`; what is known then [layers, layers].

    Where there are more, the others count by their share of R = `reference`, the correlations of the reference recipe:
    sum |s_i| |s_j| r_ij sign R_ij / sum |s_i| |s_j| |R_ij|, so that all of them together lose what they do where their
    signs are one, and layers that cancel each other do not hide those that do not.
    """
    off = (r - known).abs()
    at = (off > least).nonzero()
    more = len(at) > pairs
    if more:
        at = at[(off * sizes)[at[:, 0], at[:, 1]].topk(pairs).indices.sort().values]
    first, second = at[:, 0], at[:, 1]
    if more and reference is not None:
        rest = sizes * reference.sign()
        rest[first, second] = 0
        of_all = float((rest * reference).sum())
        one, other = (in_recipe(ANY_LAYER, recipe) for recipe in recipes)
        found.setdefault(one, {})[other] = round(float((rest * r).sum()) / of_all, 3) if of_all > 0 else 0.0
    for a, b, one in zip(first.tolist(), second.tolist(), r[first, second].tolist(), strict=True):
        found.setdefault(in_recipe(paths[a], recipes[0]), {})[in_recipe(paths[b], recipes[1])] = round(one, 3)
    known = known.clone()
    known[first, second] = r[first, second]
    return known
