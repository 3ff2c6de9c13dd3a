"""package: a frozen version as one file that AOTInductor runs without loka, in Python or C++.

The graph is aten alone: the cast of the input, which Inductor fuses into what makes it, and the GEMM of the
kernel, `aten._scaled_mm` or its emulation. FP8 weights and scales are constants of the file. It has no alarm,
no buckets, no shadow and no refresh: it is one version of the weights for any number of rows within `batch`.
"""

import copy
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loka.core.compiling import mend_compilers
from loka.core.exceptions import MissingLibrary, ServeRefused, WrongResults
from loka.core.numerics.reference import Quantized, quantize, scaled_mm
from loka.core.recipe import Gemm, Granularity
from loka.core.records.plan import Plan
from loka.core.storage.files import tensors_from_bytes, tensors_to_bytes
from loka.graph.attach import attach, detach
from loka.kernels.gemm.registry import candidate_named
from loka.nn.unwrap import named_modules
from loka.planner.convert import fp8_layers
from loka.serve.build import frozen_sites
from loka.serve.card import Card
from loka.serve.rows import Form, leaves, pad
from loka.serve.run import Runner
from loka.serve.sites import FrozenSite, HighPrecisionSite, as_rows
from loka.serve.version import Version

SHARE_OF_FP8 = 0.1
"""Mean |package - server| allowed, in what FP8 itself changes the answers by on average."""


@dataclass(frozen=True, kw_only=True)
class Packaged:
    """What a fresh process without loka found: outputs for `rows` rows of each batch size against the
    server's. `equal`: the share that is equal bit for bit."""

    path: Path
    batch: tuple[int, int]
    sizes: tuple[int, ...]
    equal: float
    mean_abs: float
    max_abs: float

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.batch[0]} to {self.batch[1]} rows; run without loka at {self.sizes}: "
            f"{self.equal:.1%} of the outputs are equal bit for bit, the others differ by at most "
            f"{self.max_abs:.2e} ({self.mean_abs:.2e} on average over all)"
        )


class PackagedSite(nn.Module):
    """A frozen site in aten ops that torch.export traces with any number of rows."""

    weight: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor | None

    def __init__(self, site: FrozenSite) -> None:
        super().__init__()
        self.site, self.sides, self.dtype = site.name, site.weight.sides, site.weight.dtype
        self.candidate = candidate_named(site.candidate)
        self.register_buffer("weight", site.weight.low.data)
        self.register_buffer("scale", site.weight.low.scale)
        self.register_buffer("input_scale", site.input_scale)

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N], as FrozenSite."""
        rows = as_rows(self.site, x, self.sides[1], self.dtype)
        casts = self.candidate.recipe.casts(Gemm.OUTPUT)
        assert casts is not None
        with torch.autocast(rows.device.type, enabled=False):
            low = quantize(rows, casts[0], padded=(rows.shape[0], self.weight.shape[1]), scale=self.input_scale)
            b = Quantized(self.weight, self.scale, casts[1])
            if self.candidate.kernel.emulates:
                y = scaled_mm(low, b, dtype=rows.dtype)
            else:
                y = _scaled_mm(low, b, rows.dtype, fast=self.candidate.kernel.fast)
        return y[:, : self.sides[0]].reshape(*x.shape[:-1], self.sides[0])


def _scaled_mm(a: Quantized, b: Quantized, dtype: torch.dtype, *, fast: bool) -> torch.Tensor:
    """As kernels/gemm/adapters/torch_scaled.py does it, without looking at addresses."""
    tensor = a.cast.granularity is Granularity.TENSOR
    scale_a = a.scale.reshape(()) if tensor else a.scale
    scale_b = b.scale.reshape(()) if tensor else b.scale.t()
    return torch._scaled_mm(a.data, b.data.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast)


class _Exported(nn.Module):
    """The model with packaged sites, called with the columns of the form in their order."""

    def __init__(self, model: nn.Module, sites: list[PackagedSite], run: Runner) -> None:
        super().__init__()
        self.model, self.sites, self.run = model, nn.ModuleList(sites), run

    def forward(self, *columns: torch.Tensor) -> Any:
        return self.run(self.model, columns)


def unpackaged(plan: Plan) -> dict[str, str]:
    """Why sites of the plan cannot go into a package, by path; empty where all can."""
    found = {}
    for path, (name, *_) in fp8_layers(plan).items():
        if name != "hp":
            reason = candidate_named(name).unpackaged
            if reason is not None:
                found[path] = f"{name}: {reason}"
    return found


@torch.no_grad()
def package_version(path: Path, card: Card, plan: Plan, version: Version, *, batch: tuple[int, int]) -> Packaged:
    """Compiles the version for `batch` rows, from least to most, and checks the file in a fresh process.

    Raises:
        ServeRefused: a device, plan, model or `batch` that cannot be packaged; the reasons are listed.
        MissingLibrary: there is no C++ compiler.
        WrongResults: the package's answers are further from the server's than its bound; no file is left.
    """
    device = next(t.device for t in [*version.module.parameters(), *version.module.buffers()] if not t.is_meta)
    _check(device, plan, batch, by_rows=any(card.in_hp))
    run = Runner(form=card.form, autocast=None if card.autocast is None else getattr(torch, card.autocast))
    exported = _exported(version.module, plan, run)
    example = pad(card.form.check_rows(device), min(max(batch[0], 2) + 3, batch[1]), card.form)
    rows = torch.export.Dim("rows", min=batch[0], max=batch[1])
    try:
        program = torch.export.export(
            exported,
            tuple(example),
            dynamic_shapes={"columns": tuple({0: rows} for _ in example)} if batch[0] < batch[1] else None,
            strict=False,
        )
    except Exception as error:  # torch.export raises of all kinds on what it cannot trace
        raise ServeRefused(
            f"torch.export does not take this {card.model}",
            why=str(error).splitlines()[:5],
            way_out="serve it from Python (`save`, `load`), or write its forward without what is named",
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / "model.pt2"
        mend_compilers()
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(made),
            # Without it Inductor keeps in float32 what eager rounds to bf16, and FP8 rounds otherwise.
            inductor_configs={"emulate_precision_casts": True},
        )
        found = _checked(made, path, card, version, run, batch)
        os.replace(made, path)
    return found


def _check(device: torch.device, plan: Plan, batch: tuple[int, int], *, by_rows: bool) -> None:
    why = [f"{path}: {reason}" for path, reason in unpackaged(plan).items()]
    if device.type != "cpu":
        why.append(f"on {device.type} no package was ever run; package on a CPU")
    if by_rows:
        why.append("it has plans by numbers of rows, and a package has one: freeze with one plan")
    if not 1 <= batch[0] <= batch[1]:
        why.append(f"batch={batch} is no range of rows")
    if why:
        raise ServeRefused(
            "this server cannot be packaged",
            why=why,
            way_out='plan again with loka.plan(..., target="package"), or serve it from Python',
        )
    if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        raise MissingLibrary("AOTInductor needs a C++ compiler", way_out="install g++, or name one by CXX")


def _exported(frozen: nn.Module, plan: Plan, run: Runner) -> _Exported:
    sites = {name: PackagedSite(site) for name, site in frozen_sites(frozen).items()}
    tensors = [*frozen.parameters(), *frozen.buffers()]
    tree = copy.deepcopy(frozen, {id(tensor): tensor for tensor in tensors})
    detach(tree)
    # Called with a site that no row reached, tracing raises: such a path cannot be in a package.
    attach(
        tree,
        plan.model.layers,
        {path: chosen for path, chosen in fp8_layers(plan).items() if chosen[0] == "hp" or path in sites},
        make=lambda name, *_, **__: sites.get(name) or HighPrecisionSite(name),
    )
    for _, module in named_modules(tree):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:  # its FP8 copy is in the site
                module._parameters[name] = nn.Parameter(parameter.new_empty(0, device="cpu"), requires_grad=False)
    return _Exported(tree, list(sites.values()), run)


_FRESH = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "loka":
            raise ImportError("loka is not to be imported")
sys.meta_path.insert(0, Hidden())
import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves
model = torch._inductor.aoti_load_package(sys.argv[1])
given, found = load_file(sys.argv[2]), {}
for size in sorted({name.partition("/")[0] for name in given}):
    columns = [given[f"{size}/{place}"] for place in range(sum(n.startswith(size + "/") for n in given))]
    for place, leaf in enumerate(tree_leaves(model(*columns))):
        found[f"{size}/{place}"] = leaf.contiguous().clone()
assert not any(name.partition(".")[0] == "loka" for name in sys.modules)
save_file(found, sys.argv[3])
"""


def _checked(made: Path, path: Path, card: Card, version: Version, run: Runner, batch: tuple[int, int]) -> Packaged:
    sizes = tuple(sorted({batch[0], min(batch[0] + 36, batch[1]), min(batch[1], 4096)}))
    device = torch.device("cpu")
    inputs = {size: _rows(card.form, size, device) for size in sizes}
    given = {f"{size}/{n}": column for size, columns in inputs.items() for n, column in enumerate(columns)}
    rows, answers = made.with_name("rows.safetensors"), made.with_name("answers.safetensors")
    rows.write_bytes(tensors_to_bytes(given))
    done = subprocess.run(
        [sys.executable, "-c", _FRESH, str(made), str(rows), str(answers)], capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise WrongResults(
            "the package does not run in a process without loka",
            why=done.stderr.splitlines()[-5:],
            way_out="serve it from Python; please report it with the versions that `loka doctor` prints",
        )
    found = tensors_from_bytes(answers.read_bytes())
    got, want = [], []
    for size in sizes:
        outputs = leaves(run(version.module, inputs[size]))
        want += [leaf.double().flatten() for leaf in outputs]
        got += [found[f"{size}/{place}"].double().flatten() for place in range(len(outputs))]
    apart = (torch.cat(got) - torch.cat(want)).abs()
    mean = float(apart.mean())
    if not mean <= SHARE_OF_FP8 * card.answers.mean_abs:
        raise WrongResults(
            "the package answers otherwise than the server",
            why=[
                f"by {mean:.2e} on average, {float(apart.max()):.2e} at most",
                f"FP8 itself changes answers by {card.answers.mean_abs:.2e} on average; a tenth is allowed",
            ],
            way_out="serve it from Python; please report it with the versions that `loka doctor` prints",
        )
    return Packaged(
        path=path,
        batch=batch,
        sizes=sizes,
        equal=float((apart == 0).double().mean()),
        mean_abs=mean,
        max_abs=float(apart.max()),
    )


def _rows(form: Form, count: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    made = []
    for column, check in zip(form.columns, form.check_rows(device), strict=True):
        shape = (count, *column.sides)
        if check.dtype.is_floating_point:
            made.append(torch.randn(shape, generator=generator).to(check.dtype))
        else:
            made.append(torch.zeros(shape, dtype=check.dtype))
    return made
