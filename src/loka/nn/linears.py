"""Finds the linear layers of a model without running it: these are the sites that need no trace."""

from collections.abc import Callable

import torch
from torch import nn

from loka.core.signature import LinearShape, ModelSignature
from loka.nn.site import DTYPES
from loka.nn.unwrap import class_name, named_modules, named_parameters, weight_of

Filter = Callable[[nn.Module, str], bool]
"""As in torchao: (module, fully qualified name) -> whether to include it."""

PREDICTION_OUTPUTS = 8


def find_linears(model: nn.Module, *, filter: Filter | None = None) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """The linear layers by module path, and why each other module that holds a GEMM weight is left out.

    Linear layers are the modules that run nn.Linear's own forward, whatever their class. A module that can be reached
    by two paths is listed under the first.
    """
    found: dict[str, nn.Linear] = {}
    skipped: dict[str, str] = {}
    for path, module in named_modules(model):
        if not isinstance(module, nn.Linear) or isinstance(module, _USED_BY_THE_PARENT):
            continue
        if type(module).forward is not nn.Linear.forward:
            skipped[path] = f"{type(module).__name__} is a subclass of nn.Linear and computes otherwise"
        elif filter is not None and not filter(module, path):
            skipped[path] = "left out by the filter"
        # By its features: a shard of its weight may be empty (FSDP).
        elif why := unsupported_weight(weight_of(module).dtype, (module.out_features, module.in_features)):
            skipped[path] = why
        else:
            found[path] = module
    return found, skipped


def unsupported_weight(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Why no site multiplies by a weight of `dtype` and `shape`; "" where one does."""
    if dtype not in DTYPES:
        return f"{dtype} weights; LoKA knows bfloat16, float16 and float32"
    return f"an empty weight {shape}" if 0 in shape else ""


# Its forward is inherited and never called: nn.MultiheadAttention multiplies by its weight itself.
_USED_BY_THE_PARENT = nn.modules.linear.NonDynamicallyQuantizableLinear


def signature(model: nn.Module, *, like: ModelSignature | None = None) -> ModelSignature:
    """The shapes of all linear layers, converted or not, and of those other sites of `like` that this model has too: it
    has the module that calls the site, and a parameter of that name that is large enough.
    """
    linears, _ = find_linears(model)
    layers = {
        path: LinearShape(
            in_features=linear.in_features, out_features=linear.out_features, bias=linear.bias is not None
        )
        for path, linear in linears.items()
    }
    traced = {} if like is None else like.traced
    if traced:
        callers = {path for path, _ in named_modules(model)}
        parameters = dict(named_parameters(model))
        for path, shape in traced.items():
            assert shape.use is not None
            held = [p for name, p in parameters.items() if is_view_of(shape.use.key, name)]
            if shape.use.caller in callers and any(
                p.numel() >= shape.in_features * shape.out_features or is_shard(p) for p in held
            ):
                layers[path] = shape
    return ModelSignature(name=class_name(model), layers=layers)


def is_view_of(key: str, parameter: str) -> bool:
    """Whether `key` names a parameter or a view of it, such as `w[:64]` or `w.chunk(2)[1]` of `w` (graph/views.py)."""
    return key == parameter or (key.startswith(parameter) and key[len(parameter)] in ".[~")


def is_shard(parameter: nn.Parameter) -> bool:
    """Whether FSDP2 or FSDP1 holds the rest of a parameter on other ranks."""
    return hasattr(parameter, "device_mesh") or getattr(parameter, "_fsdp_flattened", False)


def is_prediction(out_features: int) -> bool:
    """Whether a linear layer this narrow is taken for a final prediction layer.

    Logit layers keep their bias (the paper's mod 1) and run in high precision: quantizing
    their gradients biases training, and their GEMM is too narrow to gain anything.
    """
    return out_features <= PREDICTION_OUTPUTS
