"""The forward of a module that multiplies by parameters without nn.Linear: its GEMMs run as sites."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from loka.core.compiling import traced_here
from loka.core.exceptions import PlanMismatch
from loka.core.signature import WeightUse
from loka.graph.checkpoints import keep_sites
from loka.graph.gemm_calls import GemmCall
from loka.graph.parameters import ParameterMode
from loka.nn.leaves import with_bias
from loka.nn.site import Site, SiteForward

Uses = dict[str, list[tuple[int | None, Site]]]


class OwnerForward(SiteForward):
    """Runs the module's own forward under a function mode that knows the planned parameters.

    They are looked up at every call: FSDP2, functional_call and `load_state_dict(assign=True)` put other
    tensors in their place.
    """

    def __init__(
        self, module: nn.Module, sites: dict[WeightUse, Site], owners: list[tuple[nn.Module, str, str]], low: set[str]
    ) -> None:
        """`owners`: module, attribute and full name of each parameter that is multiplied by; `low`: names of those
        with a GEMM in FP8."""
        super().__init__(module, list(sites.values()))
        self.owners = owners
        self.uses: Uses = {}
        self.low = low
        for use, site in sites.items():
            self.uses.setdefault(f"{use.key}|{use.form}", []).append((use.expert, site))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not traced_here():
            keep_sites()
        with self.mode():
            return self.plain(*args, **kwargs)

    def mode(self) -> _Sites:
        return _Sites(self.parameters(), self)

    def parameters(self) -> list[tuple[torch.Tensor, str]]:
        return [(self._read(owner, attribute, name), name) for owner, attribute, name in self.owners]

    def _read(self, owner: nn.Module, attribute: str, name: str) -> torch.Tensor:
        """Raises PlanMismatch where the module's own read would give another tensor, and its GEMM run in high
        precision: behind `convert` somebody registered a parametrization. `parametrize.cached()` keeps the tensor."""
        found: torch.Tensor = getattr(owner, attribute)
        if name not in self.low or not parametrize.is_parametrized(owner, attribute):
            return found
        if getattr(owner, attribute) is not found:
            raise PlanMismatch(
                f"{name} is computed anew at each read, and cannot run by the plan",
                why=["it was a parameter when the model was converted, and has a parametrization now"],
                way_out="loka.revert(model), or remove the parametrization: "
                "torch.nn.utils.parametrize.remove_parametrizations",
            )
        return found


class _Sites(ParameterMode):
    def __init__(self, known: list[tuple[torch.Tensor, str]], owner: OwnerForward) -> None:
        super().__init__(known)
        self.owner, self.uses = owner, owner.uses
        self.again = self._again

    def _again(self) -> _Sites:
        """For a checkpointed function, which may read views that were made before it."""
        return _Sites([*self.owner.parameters(), *self.known], self.owner)

    def wants(self, key: str) -> bool:
        return any(use.startswith(key) for use in self.uses)

    def multiply(self, key: str, call: GemmCall, func: Any, args: Any, kwargs: Any) -> Any:
        found = self.uses.get(f"{key}|{call.form}")
        if found is None:
            return func(*args, **kwargs)
        if call.weight.dim() == 2:
            y = found[0][1](call.x, call.weight)
        else:
            y = _stacked(found, call.x, call.weight)
        # Contiguous as the call's own result, of which users take views.
        return with_bias(call.output(y).contiguous(), call.bias)


def _stacked(sites: list[tuple[int | None, Site]], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [E, M, K], weight [E, N, K] -> [E, M, N]: a GEMM for each of the stacked weights."""
    by_expert = dict(sites)
    outputs = []
    transposed = weight.stride(1) == 1 < weight.stride(2)
    # Taken apart as the parameter lies, or autograd would copy the whole gradient to lay it so.
    weights = [each.t() for each in weight.mT.unbind(0)] if transposed else weight.unbind(0)
    for expert, (rows, own) in enumerate(zip(x.unbind(0), weights, strict=True)):
        site = by_expert.get(expert)
        outputs.append(rows @ own.t() if site is None else site(rows, own))
    return torch.stack(outputs)
