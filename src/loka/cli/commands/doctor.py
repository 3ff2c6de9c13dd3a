"""`loka doctor`: what can run here, and why the rest cannot."""

import importlib.metadata
import importlib.util
import platform
from collections import defaultdict
from collections.abc import Iterable

import torch

from loka.core.device import LIBRARIES, default_device, fingerprint, library_versions
from loka.core.problem import capability, linear_problem
from loka.core.recipe import Gemm
from loka.core.table import format_table
from loka.kernels.gemm.adapters import cublaslt_c as lt
from loka.kernels.gemm.kernel import Kernel
from loka.kernels.gemm.libraries import ADAPTED, WITHOUT_ADAPTER, why_missing
from loka.kernels.gemm.registry import KERNELS, Candidate, all_candidates

_NEEDED_BY = {
    "safetensors": ("saving statistics", "safetensors"),
    "pyarrow": ("reading parquet, CSV and TSV", "loka[data]"),
    "triton": ("quantizing on a GPU", "triton"),
}


def diagnose(target: str | None) -> str:
    device = default_device()
    here = fingerprint(device)
    asked = target or here.target
    capability(asked)  # refuses a target that does not exist
    missing = {name: why_missing(name) for name in ADAPTED} | {"cublaslt": lt.why_missing()}
    here_too = [c for c in all_candidates() if missing.get(c.kernel.library) is None]
    lines = [
        f"python {platform.python_version()}, {here}",
        f"GPU: {here.device}"
        if device == "cuda"
        else f"GPU: none ({_no_gpu()}); everything but timing runs on the CPU",
        "",
        format_table(("library", "version", "needed for"), _libraries()),
        "",
        format_table(("kernels of", "version", "state"), _kernel_libraries(missing)),
        "",
        f"Candidates on {asked}, for a linear layer of 1024 x 1024 at batch 4096 in bfloat16:",
        format_table(("candidate", "output", "grad_input", "grad_weight"), _candidates(here_too, asked)),
    ]
    absent = [kernel for kernel in KERNELS.values() if missing.get(kernel.library) is not None]
    if absent:
        lines += ["", f"Kernels whose library does not work here, and what they run on {asked}:"]
        lines += _would_run(absent, asked)
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


def _kernel_libraries(missing: dict[str, str | None]) -> list[tuple[str, str, str]]:
    versions = library_versions()
    rows: list[tuple[str, str, str]] = [("torch", str(torch.__version__), "works")]
    cublaslt = missing["cublaslt"]
    rows.append(("cublaslt", "-", cublaslt) if cublaslt else ("cublaslt", str(lt.version()), "works"))
    for name, library in ADAPTED.items():
        version = versions.get(LIBRARIES[name], "-")
        state = missing[name] or f"works; known to: {library.known}"
        rows.append((name, version, state))
    rows += [(name, "-", f"no adapter: {reason}") for name, reason in WITHOUT_ADAPTER.items()]
    return rows


def _candidates(candidates: Iterable[Candidate], target: str) -> list[tuple[str, ...]]:
    return [(c.name, *_once(_answers(c, target))) for c in candidates]


def _answers(candidate: Candidate, target: str) -> list[str]:
    answers = []
    for gemm in Gemm:
        problem = linear_problem(gemm, rows=4096, in_features=1024, out_features=1024, dtype="bfloat16", target=target)
        answers.append(candidate.illegal(problem) or "yes")
    return answers


def _would_run(kernels: Iterable[Kernel], target: str) -> list[str]:
    lines = []
    for kernel in kernels:
        runs, refused = [], defaultdict(list)
        for candidate in (c for c in all_candidates() if c.kernel is kernel):
            recipe, answers = candidate.recipe, _answers(candidate, target)
            by_gemm = {g: answer for g, answer in zip(Gemm, answers, strict=True) if recipe.casts(g)}
            if "yes" in by_gemm.values():
                runs.append(recipe.name)
            for answer in set(by_gemm.values()) - {"yes"}:
                gemms = [gemm for gemm in by_gemm if by_gemm[gemm] == answer]
                where = "" if len(gemms) == len(by_gemm) else f" {' and '.join(gemms)}"
                refused[answer].append(recipe.name + where)
        sentences = [", ".join(runs)] if runs else []
        for answer, what in refused.items():
            sentences.append(f"not {', '.join(what)}: {answer}" if runs else answer)
        lines.append(f"  {kernel.name}: {'; '.join(sentences)}")
    return lines


def _once(answers: list[str]) -> list[str]:
    return [answers[0], "", ""] if answers[0] != "yes" and len(set(answers)) == 1 else answers
