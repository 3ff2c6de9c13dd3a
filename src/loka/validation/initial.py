"""What a model is before it trains, and how runs differ, so that runs of another one are not taken for its own.

A name does not tell: the same factory may build other layers tomorrow, or read other weights. Digests are of all
bytes, since a sample of a table would miss the row that differs.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from loka.core.device import value_bytes
from loka.core.exceptions import differing, truncated
from loka.nn.unwrap import require_initialized
from loka.train.checkpointing.identity import layout

_SHOWN = 8


def initial_state(model: nn.Module) -> dict[str, Any]:
    """Layout, type and shape of each buffer, and of each parameter its digest too: JSON values, the same in another
    process.

    Buffers have no digest: they may be memory that nobody wrote to yet. On a machine whose vector instructions draw
    other numbers from one seed digests differ, and wherever a model draws without torch's seed. They take 0.6 s per GB
    (SHA-256, one core of an AMD EPYC).

    Raises LokaError for lazy modules that were not called yet.
    """
    require_initialized(model)
    values = {name: _described(buffer) for name, buffer in model.named_buffers()}
    held = model.named_parameters(remove_duplicate=False)
    values |= {name: f"{_described(value)}, {_digest(value)}" for name, value in held}
    return {**layout(model), "values": values}


def differences(there: Any, now: Mapping[str, Any]) -> list[str]:
    """Lines for readers; `there` comes from a file."""
    before, after = _flat(there), _flat(now)
    names = dict.fromkeys({**before, **after}, "nothing")
    return truncated(differing({**names, **before}, {**names, **after}), _SHOWN)


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _digest(tensor: torch.Tensor) -> str:
    return "without values" if tensor.is_meta else hashlib.sha256(value_bytes(tensor.to_dense())).hexdigest()[:16]


def _flat(state: Any) -> dict[str, Any]:
    if not isinstance(state, Mapping) or not isinstance(state.get("values"), Mapping):
        return {"initial": state}
    of_model = {name: value for name, value in state.items() if name != "values"}
    return {**{f"the model's {name}": value for name, value in of_model.items()}, **state["values"]}


def settings_differing(part: str, there: Any, now: Any) -> list[str]:
    """A line for each setting of `part` in which a run that is there differs from the one that is asked for."""
    if not isinstance(there, Mapping) or not isinstance(now, Mapping):
        return [f"{part}: {there} there, {now} now"]
    keys = [key for key in {**there, **now} if there.get(key) != now.get(key)]
    return [f"{part}: {key} is {there.get(key)} there, {now.get(key)} now" for key in keys]
