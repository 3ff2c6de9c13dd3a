"""Whether a compiled model still computes what its code says.

Compilers err without a word: torch 2.11 gave outputs of two models in bf16 that were 11 % and 42 % off, in training
graphs alone (docs/log.md). So the first batch goes forward twice, as written and compiled, before anything is learnt.
"""

from collections.abc import Callable

import torch
from torch import nn

from loka.nn.site import sites_of

_OFF, _OFF_IN_FP8 = (0.1, 2**-6), (0.3, 0.3)
"""Of the logits' distance from their mean, and of that mean. Rounding of bf16 moves untrained logits by 0.2 to 3 %,
eight bits by 3 to 15 % (benchmarks/regions/README.md), and at all sites of an HSTU by 27 %, the mean too."""
_NOTHING = 1e-3  # rms of a difference of logits that changes no log loss in its sixth digit


def disagreement(model: nn.Module, forward: Callable[[], torch.Tensor]) -> str | None:
    """Why `model`, compiled, is not to be trusted, or None. `forward` gives its logits [B] or [B, tasks], with
    gradients on, from the same inputs and buffers each time. Each task counts by itself: a large one hides none.

    None too where logits as written are not finite, forward draws random numbers, which a compiler draws otherwise,
    or memory ends: nothing can be compared then.
    """
    try:
        random = _random_state()
        with torch.compiler.set_stance("force_eager"):
            written = forward().detach()
        if not all(map(torch.equal, random, _random_state())) or not written.isfinite().all():
            return None
        compiled = forward().detach()
    except torch.OutOfMemoryError:
        return None
    mean = written.mean(dim=0).expand_as(written)
    both = (written, compiled - written, written - mean, mean)
    size, apart, spread, level = (logits.reshape(len(logits), -1).norm(dim=0) for logits in both)
    of_spread, of_level = _OFF_IN_FP8 if sites_of(model) else _OFF
    allowed = (of_spread * spread + of_level * level).clamp_min(_NOTHING * len(written) ** 0.5)
    task = int((apart / allowed).argmax())  # where any is NaN, that one
    if apart[task] <= allowed[task]:  # NaN is not
        return None
    return f"compiled, its logits are {_share(apart[task], size[task])} away from those of its code as written"


def _share(apart: torch.Tensor, size: torch.Tensor) -> str:
    return f"{apart / size:.0%}" if size > 0 else f"{apart:.2g} (norm, and those are all 0)"


def _random_state() -> list[torch.Tensor]:
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *on_gpu]
