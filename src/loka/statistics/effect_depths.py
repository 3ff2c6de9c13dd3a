"""What a site's error costs the model by any format, from depth histograms alone: nothing is quantized.

    term = 1/2 sum_k Jx_k^2 (x_k - x^_k)^2  +  1/2 sum_jk A_jk (W_jk - W^_jk)^2        of one sample

Jx = g W, and A_jk = (g_j x_k)^2; where a sample has several rows, the first sum runs over all of them
and A = (sum_rows g_j x_k)^2, for an error of the weight is the same in every row. Errors are taken for
independent with mean 0, so products of different elements vanish in the mean. With Jx^2 and A as the
weights of core/numerics/depth.py, one histogram for each kind of scale answers for every format. They are
kept as `effect_depth_<granularity>` beside the tensors of `input` and `weight`: sums over the samples of
`LinearStats.effects`, the three WEIGHTED columns of a depth histogram.

A plan fixes m of centred recipes, and the columns of hot ones, for all rows to come; means and hot columns of
the rows of one step would be better than those wherever steps differ, by domain or hour. `Learnt` is what is
known of both by the steps so far.

Hot columns (core/numerics/hot_columns.py) take their share of both terms away: that of sum_i Jx_k^2 x_k^2 and
of sum_ij A_jk W_jk^2, which `effect_columns` of `input` keeps [K, 2].
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from loka.core.numerics.centring import centre_of, centre_of_rows, subtract
from loka.core.numerics.depth import WEIGHTED, DepthHistogram, error_sum
from loka.core.numerics.hot_columns import LEFT, hottest
from loka.core.recipe import Cast, Casts
from loka.core.records.stats import LinearStats
from loka.statistics.depths import Layout, Request, collect_all, layout_of, merge
from loka.statistics.row_picks import sent

PREFIX = "effect_"
_CENTRED = "_centred"
_COLUMNS = "effect_columns"
OPERANDS = ("input", "weight")

Tables = dict[str, torch.Tensor]
"""[ROWS, 3] float64 by "input/effect_depth_row" and so on; [K, 2] as "input/effect_columns"."""


@dataclass(frozen=True)
class Learnt:
    """Of a site's input, by all rows seen: m [K] of centred recipes, None where nothing is known; and the tables
    of its hot columns, if there are any."""

    centre: torch.Tensor | None = None
    tables: Tables = field(default_factory=dict)

    def hottest(self, left: Cast, device: torch.device) -> torch.Tensor | None:
        """The columns that a hot recipe takes."""
        table = self.tables.get(f"input/{_COLUMNS}" + (_CENTRED if left.centred else ""))
        return None if table is None or not table.any() else hottest(table.sum(dim=1).to(device), left.hot)


NOTHING = Learnt()

_ELEMENTS = 1 << 17  # of an operand that are looked at in a step
_CHUNK = 1 << 22  # elements of A, over samples, at a time


def effect_tables(
    given: torch.Tensor,
    weight: torch.Tensor,
    grads: torch.Tensor,
    rows: torch.Tensor,
    casts: Iterable[Casts],
    generator: torch.Generator,
    learnt: Learnt = NOTHING,
) -> Tables:
    """Of the samples whose rows in `given` [T, K] and `grads` [T, N] are `rows` [m, n].

    Large operands are represented by random rows of them; `weight` [N, K]. What centred casts do is asked of
    x - m, by default the means of these rows: both histograms are others, and have names of their own.
    """
    several = list(casts)
    tables = _tables(given, weight, grads, rows, [pair for pair in several if not pair[0].centred], generator)
    if any(left.centred for left, _ in several):
        plain = [(replace(left, centred=False), right) for left, right in several if left.centred]
        centred = subtract(given, centre_of_rows(given) if learnt.centre is None else learnt.centre)
        found = _tables(centred, weight, grads, rows, plain, generator)
        tables |= {name + _CENTRED: table for name, table in found.items()}
    return tables


def _tables(
    given: torch.Tensor,
    weight: torch.Tensor,
    grads: torch.Tensor,
    rows: torch.Tensor,
    casts: Sequence[Casts],
    generator: torch.Generator,
) -> Tables:
    """`effect_tables` of casts that are not centred.

    An element of `given` weighs by (g W)^2 of its row, one of `weight` by the square of its g^T x, both summed over
    samples: the factor by which its own squared error enters the term (core/numerics/effect.py).
    """
    wanted: dict[str, dict[Layout, None]] = {operand: {} for operand in OPERANDS}
    for pair in casts:
        for operand, cast in zip(OPERANDS, pair, strict=True):
            wanted[operand][layout_of(cast, transposed=False)] = None
    flat, factor = _some(rows.numel(), given.shape[1], generator)
    at = rows.flatten() if flat is None else rows.flatten()[sent(flat, rows.device)]
    sensitive = (grads[at].float() @ weight.float()).square() * factor
    by_column = [(sensitive * given[at].float().square()).nan_to_num(0, 0).sum(dim=0)]
    requests = [Request(hp=given, wanted=wanted["input"], picked=at, weight=sensitive)]
    outputs, factor = _some(weight.shape[0], weight.shape[1], generator)
    outputs = None if outputs is None else sent(outputs, weight.device)
    sensitive = _weight_sensitivity(given, grads, rows, outputs) * factor
    low = weight if outputs is None else weight[outputs]
    by_column.append((sensitive * low.float().square()).nan_to_num(0, 0).sum(dim=0))
    requests.append(Request(hp=weight, wanted=wanted["weight"], picked=outputs, weight=sensitive))
    found = {
        f"{operand}/{PREFIX}{name}": table
        for operand, tables in zip(OPERANDS, collect_all(requests, weighted_only=True), strict=True)
        for name, table in tables.items()
    }
    if any(left.hot for left, _ in casts):
        found[f"input/{_COLUMNS}"] = torch.stack(by_column, dim=1).double()
    return found


def centre_of_input(layer: LinearStats) -> torch.Tensor:
    """What centred recipes take off the input, m [K] on the CPU: from the means that the probe learnt.

    One zero for all columns where the statistics hold no means: those of a bench's shapes.
    """
    learnt = layer.operands["input"]
    if not {"mean", "square"} <= learnt.tensors.keys():
        return torch.zeros(1, device="cpu")
    count = max(int(learnt.numbers["count"]), 1)
    return centre_of(learnt.tensors["mean"].cpu(), learnt.tensors["square"].cpu() / count)


def hot_of(layer: LinearStats, left: Cast) -> tuple[torch.Tensor, list[float]] | None:
    """The columns that a hot recipe takes, and their shares of both terms; None where nothing tells."""
    table = layer.operands["input"].tensors.get(_COLUMNS + (_CENTRED if left.centred else ""))
    if table is None or not table.any():
        return None
    columns = hottest(table.sum(dim=1), left.hot)
    return columns, (table[columns].sum(dim=0) / table.sum(dim=0)).nan_to_num(0).tolist()


def merge_tables(tables: Tables, others: Tables) -> Tables:
    """The sums; a table that is in one of the two stays."""
    return merge(others, tables)


def faded_tables(tables: Tables, factor: float) -> Tables:
    """Of the same samples with `factor` times their weight."""
    if not tables:
        return {}
    return dict(zip(tables, torch._foreach_mul(list(tables.values()), factor), strict=True))


def tables_of(layer: LinearStats) -> Tables:
    return {
        f"{operand}/{name}": table
        for operand in OPERANDS
        for name, table in layer.operands[operand].tensors.items()
        if name.startswith(PREFIX)
    }


def columns_in(tables: Tables) -> Tables:
    """Those that tell hot columns; without any that say nothing."""
    return {name: table for name, table in tables.items() if name.startswith(f"input/{_COLUMNS}") and table.any()}


def is_centred(name: str) -> bool:
    """Whether a tensor of an operand is a histogram of x - m."""
    return name.startswith(f"{PREFIX}depth_") and name.endswith(_CENTRED)


def depth_loss(layer: LinearStats, casts: Casts) -> float | None:
    """Nats a sample that quantizing the `output` GEMM with `casts` adds; None where no histogram fits."""
    samples = max((effect.count for effect in layer.effects.values()), default=0)
    if not samples:
        return None
    terms, hot = 0.0, hot_of(layer, casts[0]) if casts[0].hot else (None, [0.0, 0.0])
    if hot is None:
        return None
    for operand, cast, share in zip(OPERANDS, casts, hot[1], strict=True):
        name = _name(cast) + (_CENTRED if casts[0].centred else "")
        table = layer.operands[operand].tensors.get(name)
        if table is None:
            return None
        whole = torch.zeros(table.shape[0], 10, dtype=torch.float64, device=table.device)
        whole[:, -3:] = table
        kept = 1 - (1 - LEFT) * share
        terms += kept * error_sum(DepthHistogram(whole), cast.format, weighting=WEIGHTED).item()
    return terms / 2 / samples


def _name(cast: Cast) -> str:
    return PREFIX + layout_of(cast, transposed=False).name


def _some(rows: int, columns: int, generator: torch.Generator) -> tuple[torch.Tensor | None, float]:
    """Rows that stand for all `rows` of an operand, and how many each stands for; None: all are taken."""
    kept = max(_ELEMENTS // max(columns, 1), 1)
    if rows <= kept:
        return None, 1.0
    return torch.randperm(rows, generator=generator, device="cpu")[:kept], rows / kept


def _weight_sensitivity(
    given: torch.Tensor, grads: torch.Tensor, rows: torch.Tensor, outputs: torch.Tensor | None
) -> torch.Tensor:
    """A [N, K], summed over the samples, for all outputs or some."""
    grads = grads if outputs is None else grads[:, outputs]
    if rows.shape[1] == 1:
        at = rows.flatten()
        return grads[at].float().square().t() @ given[at].float().square()
    total = torch.zeros(grads.shape[1], given.shape[1], device=grads.device)
    step = max(1, _CHUNK // max(total.numel(), rows.shape[1] * max(total.shape), 1))
    for part in rows.split(step):
        products = grads[part].float().transpose(1, 2) @ given[part].float()
        total += products.square().sum(dim=0)
    return total
