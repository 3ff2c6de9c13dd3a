"""What a sampled step keeps of each call of a site, for the extra backward of sensitivity.py."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from loka.core.exceptions import first_line
from loka.probe.model_effects.error_projection import changes_of
from loka.probe.model_effects.logits import NoEffect
from loka.probe.model_effects.sample_rows import rows_of
from loka.probe.trace import unseen
from loka.statistics.effect_casts import CASTS
from loka.statistics.effect_depths import Learnt, Tables, effect_tables


@dataclass(eq=False)
class Step:
    """A sampled step. `picks` where its output showed no logits: of training's gradient, in `pending`.

    `gradients`: of each call's site, whether one at its output is other than 0, on the device.
    """

    batch: int = 0
    picks: torch.Tensor | None = None
    pending: dict[str, tuple[torch.Tensor, Tables]] = field(default_factory=dict)
    gradients: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def reached(self) -> set[str]:
        """The sites at whose outputs some gradient was other than 0. Waits for the device, once for all sites."""
        if not self.gradients:
            return set()
        paths, flags = zip(*self.gradients, strict=True)
        found = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
        return {path for path, some in zip(paths, found, strict=True) if some}


@dataclass(frozen=True)
class Call:
    """A site's call. `given` shares the input's memory and its `version` counter; `rows` brings a gradient
    of what was returned to [..., N]."""

    path: str
    weight: torch.Tensor
    given: torch.Tensor
    version: int
    dtype: torch.dtype
    rows: Callable[[torch.Tensor], torch.Tensor]
    step: Step


@dataclass(frozen=True)
class Found:
    """Of one pass: s [m, recipes] and histograms by site, rows [m], logits and signed weights [m, T].

    `by_task`: s of each task's logit by itself, by site; empty where nobody asked, or there is one task.
    `unreached`: s of sites where the gradient of these rows is 0. It counts where other rows reach the site.
    """

    sites: Mapping[str, tuple[torch.Tensor, Tables]]
    picks: torch.Tensor
    logits: torch.Tensor
    signed: torch.Tensor
    by_task: Sequence[Mapping[str, torch.Tensor]] = ()
    unreached: Mapping[str, torch.Tensor] = field(default_factory=dict)


Sink = Callable[[Found], None]


def step_seed(seed: int, step: int) -> int:
    """For the generator of one step: what is random there depends on nothing that came before."""
    return (seed * 1_000_003 + step) % (1 << 63)


def refuse_freed(calls: Sequence[Call]) -> None:
    """Raises NoEffect where a weight has no memory any more: a backward that reads it ends the process."""
    for call in calls:
        weight = call.weight
        if weight.untyped_storage().nbytes() < weight.nbytes:
            raise NoEffect(f"the weight of {call.path} was freed after its call, as a wrapper that shards does")


def reason_of(error: Exception) -> str:
    return str(error) if isinstance(error, NoEffect) else first_line(error)


def changes_at(
    call: Call,
    grad: torch.Tensor,
    picks: torch.Tensor,
    batch: int,
    generator: torch.Generator,
    *,
    of_all: bool = False,
    tables: bool,
    learnt: Learnt,
) -> tuple[torch.Tensor, Tables]:
    """s [m, recipes] float32: what each recipe's error changes v by, to first order; and, with `tables`,
    histograms. Notes in the step whether a gradient reaches the call: cat and stack send zeros to what the logits
    leave out, where others send none."""
    weight = call.weight
    if call.given._version != call.version:
        raise NoEffect("its input was changed in place after the call")
    with unseen(), torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
        grads = grad if of_all else call.rows(grad)
        grads = grads.reshape(-1, grads.shape[-1])
        call.step.gradients.append((call.path, grads.any()))
        rows = rows_of(call.given.shape[:-1], grads, picks.to(grad.device), batch, of_all=of_all)
        given = call.given.reshape(-1, call.given.shape[-1]).to(call.dtype)
        changes = changes_of(given, weight, grads, rows, tuple(CASTS.values()), learnt)
        found = effect_tables(given, weight, grads, rows, CASTS.values(), generator, learnt) if tables else {}
    return changes, found
