"""Fp8Linear: a linear layer whose three GEMMs are decided separately.

It is the same module object with another class: parameters, hooks, shared references and
`state_dict` keys stay as they are, and `restore_linear` makes it an `nn.Linear` again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from loka.core.exceptions import NotConverted
from loka.core.recipe import Gemm
from loka.core.report import HP, site_name
from loka.kernels.quantizer import BAD_A, BAD_B, RUNS
from loka.kernels.registry import candidate_named
from loka.nn.ops import GEMMS, LinearGemms
from loka.nn.unwrap import unwrap

# What an FP8 layer computes in. Autocast recasts these too, and leaves every other dtype alone.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Fp8Linear(nn.Linear):
    """y = x W^T + b with FP8 GEMMs where the plan says so; x [..., in] -> y [..., out].

    `loka_health` int64 [3, 3] is an attribute, not a buffer: DistributedDataParallel would
    overwrite every rank's flags with those of rank 0.

    Made by `convert_linear`. Runs in the input's dtype, or autocast's where that is on, as
    nn.Linear does; quantizes from the stored weight, so float32 weights are rounded once.
    """

    loka_path: str
    loka_candidates: tuple[str, str, str]
    loka_health: torch.Tensor
    loka_hook: torch.utils.hooks.RemovableHandle

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.is_nested:  # nn.TransformerEncoder packs padded sequences so, in inference
            parts = input.unbind()
            packed = self(torch.cat(parts)).split([part.shape[0] for part in parts])
            return torch.nested.as_nested_tensor(list(packed), layout=input.layout)
        output = self._multiply(input)
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        # As F.linear does: a plain view of a custom function's output refuses in-place ops.
        return torch.ops.aten._unsafe_view(output, [*input.shape[:-1], self.out_features])

    def _multiply(self, input: torch.Tensor) -> torch.Tensor:
        """x W^T [T, out]."""
        if input.shape[-1] != self.in_features:
            raise ValueError(
                f"{self.loka_path}: input has {input.shape[-1]} features, the layer takes {self.in_features}"
            )
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.dtype in DTYPES:
            input = input.to(torch.get_autocast_dtype(kind))
        elif input.dtype != self.weight.dtype:
            raise TypeError(
                f"{self.loka_path}: input is {input.dtype}, the weight {self.weight.dtype}; "
                "cast one, or use torch.autocast"
            )
        rows = input.reshape(-1, self.in_features)
        training = torch.is_grad_enabled()
        keep = (training and self.weight.requires_grad, training and rows.requires_grad)
        return LinearGemms.apply(rows, self.weight, self.loka_health, self.loka_candidates, keep)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Fp8Linear:
        super()._apply(fn, recurse)
        self.loka_health = fn(self.loka_health)
        return self

    def extra_repr(self) -> str:
        decided = ", ".join(f"{gemm}={name}" for gemm, name in zip(GEMMS, self.loka_candidates, strict=True))
        return f"{super().extra_repr()}, {decided}"


def _stay_in_python(module: nn.Module, args: tuple[object, ...]) -> None:
    """A hook that does nothing. Its presence keeps nn.TransformerEncoderLayer out of the fused
    inference path, which reads `linear1.weight` itself and would pass the FP8 layer by."""


def convert_linear(linear: nn.Linear, *, path: str, candidates: tuple[str, str, str]) -> None:
    """Turns `linear` into an Fp8Linear in place.

    Args:
        linear: exactly an nn.Linear; a subclass may compute something else.
        path: its module path, for messages.
        candidates: for output, grad_input and grad_weight: "hp" or "kernel:recipe".

    Raises:
        NotConverted: it is converted already, or it is not exactly an nn.Linear.
        UnknownName: a candidate that does not exist.
    """
    if type(linear) is not nn.Linear:
        reason = (
            "it is converted already" if isinstance(linear, Fp8Linear) else f"it is a {type(linear).__name__}"
        )
        raise NotConverted(
            f"cannot convert {path}", why=[reason], way_out="revert the model, or skip this layer"
        )
    for name in candidates:
        if name != HP:
            candidate_named(name)
    linear.__class__ = Fp8Linear
    assert isinstance(linear, Fp8Linear)
    linear.loka_path = path
    linear.loka_candidates = candidates
    with torch.inference_mode(False):  # an inference tensor could not be counted in later
        linear.loka_health = torch.zeros(len(GEMMS), 3, dtype=torch.int64, device=linear.weight.device)
    linear.loka_hook = linear.register_forward_pre_hook(_stay_in_python)


def restore_linear(linear: Fp8Linear) -> None:
    """Makes a plain nn.Linear of it again; nothing of LoKA stays on the object."""
    linear.loka_hook.remove()
    del linear.loka_health, linear.loka_path, linear.loka_candidates, linear.loka_hook
    linear.__class__ = nn.Linear  # type: ignore[assignment]


def fp8_linears(model: nn.Module) -> dict[str, Fp8Linear]:
    """The converted layers by their module path in `model` (a bare layer by its own name)."""
    modules = unwrap(model).named_modules()
    return {path or m.loka_path: m for path, m in modules if isinstance(m, Fp8Linear)}


def health_of(model: nn.Module) -> dict[str, dict[str, int | bool]]:
    """Per FP8 site: `runs` so far, and whether a non-finite `a` or `b` operand was ever seen.

    Counted on the device, so CUDA-graph replays count too. Reading it synchronizes.
    """
    found: dict[str, dict[str, int | bool]] = {}
    for path, linear in fp8_linears(model).items():
        rows = linear.loka_health.tolist()
        for gemm, candidate, counts in zip(GEMMS, linear.loka_candidates, rows, strict=True):
            if candidate != HP:
                found[site_name(path, gemm)] = {
                    "runs": counts[RUNS],
                    "bad_a": bool(counts[BAD_A]),
                    "bad_b": bool(counts[BAD_B]),
                }
    return found


OPERAND_NAMES = {
    Gemm.OUTPUT: ("input", "weight"),
    Gemm.GRAD_INPUT: ("grad_output", "weight"),
    Gemm.GRAD_WEIGHT: ("grad_output", "input"),
}
