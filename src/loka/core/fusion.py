"""The internal switch behind which chains, stacks of cross layers and turned layers run.

Without it plans name none, `measure` times none, and `convert` runs a plan that names some by the decisions
of its sites. These forms hand tensors from one module to the next by rules that were seen in one forward
pass: a model that is then used in another way (called in part, with a member replaced or averaged, from
several threads) can be silently wrong. Regions in a captured graph, where PyTorch proves who reads what,
are to replace them. Until then benchmarks and the tests of these forms switch them on; nothing is public.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from loka.core.plan import Plan

NOT_PLANNED = (
    "chains are not planned: they can be wrong where a model is used in another way than when it was probed, "
    "so every layer runs by its own sites; Budget(chains=...) has no effect"
)

_FORCED: ContextVar[bool] = ContextVar("loka_forced_fusion", default=False)


@contextmanager
def forced_fusion() -> Iterator[None]:
    """Within it chains, stacks of cross layers and turned layers are timed, planned and formed.

    A thread or process that is started inside does not inherit it, and enters it by itself.
    """
    token = _FORCED.set(True)
    try:
        yield
    finally:
        _FORCED.reset(token)


def fusion_forced() -> bool:
    return _FORCED.get()


def as_it_runs(plan: Plan) -> Plan:
    """What `convert` makes of `plan` here: outside of `forced_fusion`, the decisions of its sites alone."""
    if fusion_forced() or not (plan.wholes or plan.turned):
        return plan
    return replace(plan, chains={}, crosses={}, turned={})


def left_out(plan: Plan) -> list[str]:
    """What `as_it_runs` leaves out of `plan`, a line for each kind."""
    if as_it_runs(plan) is plan:
        return []
    kinds = {"chains": plan.chains, "stacks of cross layers": plan.crosses, "turned layers": plan.turned}
    return [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]
