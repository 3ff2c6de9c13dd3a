"""What a run and its checkpoints share: another configuration, model, plan or rows would end with other bits.

load_newest    compares it with what a folder holds
ranks          compare it before they train, but for seeds and rows of their own
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from loka.core.exchange import rank_of, ranks_of
from loka.core.records.plan import Plan
from loka.core.storage.files import canonical
from loka.data import Dealt
from loka.data.batch import Source, history_of, tasks_of
from loka.distributed.tables.sharded_tables import sharded_modules, sharded_weights
from loka.nn import unwrap
from loka.nn.unwrap import kind_of
from loka.train.config import TrainConfig


def run_identity(
    model: nn.Module,
    source: Source,
    config: TrainConfig,
    *,
    plan: Plan | None,
    beside: Mapping[str, Any] | None,
    segments: Mapping[str, Any] | None,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """What a checkpoint has to share for a run to go on from it: `beside` of its callback, `extra` of its caller.

    Raises ValueError or TypeError where a value is not JSON: now, not at the first save.
    """
    identity = {
        "config": config.identity(ranks=ranks_of()),
        "source": rows_identity(source),
        "model": layout(unwrap(model) if ranks_of() > 1 or sharded_modules(model) else model),
        "plan": plan_identity(plan),
        "beside": beside,
        "segments": segments,
        "extra": dict(extra),
    }
    canonical(identity)
    return identity


def plan_identity(plan: Plan | None) -> dict[str, Any] | None:
    """What of a plan decides the weights, which its times do not."""
    if plan is None:
        return None
    return {"sites": {name: decision.candidate for name, decision in plan.decisions.items()}}


def layout(model: nn.Module) -> dict[str, Any]:
    """Modules and weights in a form that is short enough for a manifest. It differs for another model, for a converted
    one, and for one with other weights frozen, since optimizers number their weights by these. It is the same for a
    sharded model, however many ranks share it.
    """
    lines = [f"{name} {kind_of(module).__qualname__}" for name, module in model.named_modules()]
    tables, own = sharded_weights(model), dict(model.named_parameters())
    weights = {**own, **tables}
    lines += [f"{name} frozen" for name, w in own.items() if name not in tables and not w.requires_grad]
    lines += [f"{name} {tuple(w.shape)} {w.dtype}" for name, w in weights.items()]
    return {
        "class": kind_of(model).__name__,
        "weights": sum(weight.shape.numel() for weight in weights.values()),
        "layout": hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16],
    }


def rows_identity(source: Source) -> dict[str, Any]:
    """The identity of the rows of all ranks, where any number of ranks can share them out; else of the rows of this
    rank.
    """
    if isinstance(source, Dealt):
        return {"identity": source.identity, "rows": source.all_rows, "parts": len(source.parts)}
    own = {"identity": source.identity, "rows": source.rows}
    return own if ranks_of() == 1 else {**own, "rank": rank_of()}


def shared_by_ranks(identity: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """What has to be equal on all ranks: the identity of the run, but for the seed, which draws dropout, and for rows
    that are a rank's own, of which the columns count; and torch.
    """
    history = history_of(source)
    columns = {
        "dense": source.dense_features,
        "sparse": dict(enumerate(source.vocab_sizes)),
        "history": None if history is None else [history.length, history.vocab_size],
        "tasks": tasks_of(source),
    }
    config = {name: value for name, value in identity["config"].items() if name != "seed"}
    rest = {name: value for name, value in identity.items() if name != "config"}
    rows = rest["source"] if isinstance(source, Dealt) else None
    return {**config, **rest, "source": rows, "columns": columns, "torch": torch.__version__}
