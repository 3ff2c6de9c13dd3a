"""Finding the linear layers of any model: the modules whose GEMMs LoKA can decide."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from loka.core.signature import LinearShape, ModelSignature
from loka.nn.fp8_linear import DTYPES, Fp8Linear
from loka.nn.turned import TurnedLinear
from loka.nn.unwrap import unwrap

Filter = Callable[[nn.Module, str], bool]
"""As in torchao: (module, fully qualified name) -> whether to include it."""

PREDICTION_OUTPUTS = 8


def find_linears(
    model: nn.Module, *, filter: Filter | None = None
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """The linear layers by module path, and why each other holder of GEMM weights is left out.

    A subclass of nn.Linear may compute something else, so only exact ones count. A module
    reached by two paths is listed under the first.
    """
    found: dict[str, nn.Linear] = {}
    skipped: dict[str, str] = {}
    for path, module in unwrap(model).named_modules():
        if type(module) in (nn.Linear, Fp8Linear, TurnedLinear) or _chained(module):
            assert isinstance(module, nn.Linear)
            if filter is not None and not filter(module, path):
                skipped[path] = "left out by the filter"
            elif module.weight.dtype not in DTYPES:
                skipped[path] = f"{module.weight.dtype} weights; LoKA knows bfloat16, float16 and float32"
            elif 0 in module.weight.shape:
                skipped[path] = f"an empty weight {tuple(module.weight.shape)}"
            else:
                found[path] = module
        elif isinstance(module, nn.Linear):
            skipped[path] = f"{type(module).__name__} is a subclass of nn.Linear and may compute otherwise"
        elif isinstance(module, nn.MultiheadAttention):
            skipped[path] = (
                "nn.MultiheadAttention multiplies by raw parameters, not through nn.Linear modules"
            )
    return found, skipped


def _chained(module: nn.Module) -> bool:
    """A linear layer inside a chain (nn/chain.py): exactly an nn.Linear before."""
    return getattr(module, "loka_was", None) is nn.Linear


def signature(model: nn.Module) -> ModelSignature:
    """All linear layers with their shapes, converted or not."""
    linears, _ = find_linears(model)
    layers = {
        path: LinearShape(
            in_features=linear.in_features, out_features=linear.out_features, bias=linear.bias is not None
        )
        for path, linear in linears.items()
    }
    return ModelSignature(name=type(unwrap(model)).__name__, layers=layers)


def is_prediction(out_features: int) -> bool:
    """Whether a linear layer this narrow is taken for a final prediction layer.

    Logit layers keep their bias (the paper's mod 1) and run in high precision: quantizing
    their gradients biases training, and their GEMM is too narrow to gain anything.
    """
    return out_features <= PREDICTION_OUTPUTS
