"""`loka doctor`: what can run here, and why the rest cannot."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform

import torch

from loka.core.device import fingerprint, library_versions
from loka.core.problem import capability, linear_problem
from loka.core.recipe import Gemm
from loka.core.table import format_table
from loka.kernels.registry import all_candidates

_NEEDED_BY = {
    "safetensors": ("saving statistics", "safetensors"),
    "pyarrow": ("reading parquet, CSV and TSV", "loka[data]"),
    "triton": ("quantizing on a GPU", "triton"),
}


def diagnose(target: str | None = None) -> str:
    """The doctor's page, for this machine or for a named target such as "sm_90"."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    here = fingerprint(device)
    asked = target or here.target
    capability(asked)  # refuses a target that does not exist
    lines = [
        f"python {platform.python_version()}, {here}",
        f"GPU: {here.device}"
        if device == "cuda"
        else f"GPU: none ({_no_gpu()}); everything but timing runs on the CPU",
        "",
        format_table(("library", "version", "needed for"), _libraries()),
        "",
        f"Candidates on {asked}, for a linear layer of 1024 x 1024 at batch 4096 in bfloat16:",
        format_table(("candidate", "output", "grad_input", "grad_weight"), _candidates(asked)),
    ]
    found = library_versions()
    if found:
        lines += [
            "",
            "Libraries whose versions a plan records: " + ", ".join(f"{k} {v}" for k, v in found.items()),
        ]
    return "\n".join(lines)


def _no_gpu() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    return "torch was built for CUDA but sees no device; is a driver installed?"


def _libraries() -> list[tuple[str, str, str]]:
    rows = []
    for name, (purpose, install) in _NEEDED_BY.items():
        if importlib.util.find_spec(name) is None:
            rows.append((name, f"not installed (pip install '{install}')", purpose))
        else:
            rows.append((name, importlib.metadata.version(name), purpose))
    return rows


def _candidates(target: str) -> list[tuple[str, ...]]:
    rows = []
    for candidate in all_candidates():
        answers = []
        for gemm in Gemm:
            problem = linear_problem(
                gemm, rows=4096, in_features=1024, out_features=1024, dtype="bfloat16", target=target
            )
            answers.append(candidate.unsupported(problem) or "yes")
        rows.append((candidate.name, *_once(answers)))
    return rows


def _once(answers: list[str]) -> list[str]:
    """A reason that holds for all three GEMMs is said once."""
    return [answers[0], "", ""] if answers[0] != "yes" and len(set(answers)) == 1 else answers
