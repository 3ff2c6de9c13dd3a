"""package: a frozen version as one file that AOTInductor runs without loka, in Python or C++.

Sites that were frozen for graphs are joined into regions, whose kernels are written into the file
(compiler/packaged.py). Others are aten alone: the cast of the input, which Inductor fuses into what makes it, and
the GEMM of the kernel, `aten._scaled_mm` or its emulation. FP8 weights and scales are constants of the file. It has
no alarm, no buckets and no shadow, and holds one version of the weights for any number of rows within `batch`; those of
another one are a file of their own (weights.py).
"""

import json
import math
import os
import shutil
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loka.core.compiling import mend_compilers
from loka.core.error import sqnr_db
from loka.core.exceptions import LokaError, MissingLibrary, ServeRefused, WrongResults, truncated
from loka.core.records.plan import Plan
from loka.core.records.report import HP
from loka.core.storage.codec import encode
from loka.core.storage.files import file_behind, sha256_of_file, writing
from loka.kernels.gemm.registry import candidate_named
from loka.planner.convert import fp8_layers
from loka.serve.card import Card
from loka.serve.packaging.checksum import checksum_of, write_checksum
from loka.serve.packaging.exported import Contents, Exported, contents_of, exported
from loka.serve.packaging.fresh import answers_of, folder_beside
from loka.serve.rows import leaves
from loka.serve.run import Runner, runner_of
from loka.serve.sites import frozen_sites
from loka.serve.version import Version
from loka.serve.watch.agreement import AnswerError, disagreements, error_of, finite_in_both

SHARE_OF_FP8 = 0.1
"""Mean |package - server| allowed without regions, in what FP8 itself changes the answers by on average."""
UNITS = 8
"""Allowed at least, in units in the last place at the answers' root mean square, as FP8 changes some outputs by
nothing. A sum of 500 terms in another order is off by a random walk of roundings, about 5 units, and exp or tanh
by vectors by one or two."""

METADATA = "loka"
"""Name of a package's metadata, a `Contents`."""

ANEW = "make the package anew: server.package(path)"

KEEPING = threading.Lock()  # of two that go to one path, the file and the checksum of the same one stay


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What a fresh process without loka found: outputs for `rows` rows of each batch size in `sizes` against those of
    the frozen model, run eagerly. `equal`: the share that is equal bit for bit. `mean_abs`, `max_abs`, `sqnr_db`: of
    the output that differs most."""

    sizes: tuple[int, ...]
    equal: float
    mean_abs: float
    max_abs: float
    sqnr_db: float

    @property
    def summary(self) -> str:
        return (
            f"{self.equal:.1%} of the outputs are equal bit for bit to those of the model run "
            f"eagerly, the others differ by at most {self.max_abs:.2e} ({self.mean_abs:.2e} on average over all; "
            f"{self.sqnr_db:.1f} dB)"
        )


@dataclass(frozen=True, kw_only=True)
class Packaged(Agreement):
    """A package. `joined`: how many sites are in regions. `sha256`: of the file, which stands in PATH.sha256 too.
    `takes`: its inputs, by place."""

    path: Path
    batch: tuple[int, int]
    joined: int
    sha256: str
    takes: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.batch[0]} to {self.batch[1]} rows; run without loka at {self.sizes}, {self.joined} "
            f"sites in regions: {self.summary}\n"
            f"called by place with {'; '.join(truncated(self.takes, 8))}: these dtypes, contiguous, all of as many "
            f"rows B. It looks at none of that and answers the rest with nonsense; AOTI_RUNTIME_CHECK_INPUTS=1 "
            f"refuses it{', and single rows' if self.batch[0] == 1 < self.batch[1] else ''}\n"
            f"sha256 {self.sha256}, in {checksum_of(self.path).name} too"
        )


def unpackaged(plan: Plan) -> dict[str, str]:
    """Why sites of the plan cannot go into a package, by path; empty where all can."""
    found = {}
    for path, (name, *_) in fp8_layers(plan).items():
        if name != HP:
            reason = candidate_named(name).unpackaged
            if reason is not None:
                found[path] = f"{name}: {reason}"
    return found


@torch.no_grad()
def package_version(
    path: Path, card: Card, plan: Plan, version: Version, *, batch: tuple[int, int], device: torch.device
) -> Packaged:
    """Compiles the version, on `device`, for `batch` rows, from least to most; checks the file in a fresh process.

    Raises:
        ServeRefused: a device, plan, model or `batch` that cannot be packaged; the reasons are listed.
        MissingLibrary: there is no C++ compiler.
        WrongResults: the package's answers are further from the server's than its bound, or it gives none; no file
            is left.
        NotWritten: the disk refuses the file; what was there stands.
    """
    _check(device, plan, batch, by_rows=any(card.in_hp))
    if path.is_dir():
        raise ServeRefused(f"{path} is a folder", way_out=f"name a file, such as {path / 'model.pt2'}")
    if path.suffix != ".pt2":
        raise ServeRefused(
            f"{path} is no name of a package",
            why=["torch takes files without .pt2 for ones that it cannot load"],
            way_out=f"name it {path}.pt2",
        )
    from torch._dynamo.convert_frame import compile_lock  # here, as it takes a while to import

    run = runner_of(card)
    with folder_beside(path) as folder:  # before compiling, which takes minutes
        joined = _joined(version)
        with compile_lock:  # export and compile patch torch as they run: two at once refuse each other's models
            made = _compiled(Path(folder), card, exported(version.module, plan, run, device), joined, batch, device)
        digest = sha256_of_file(made)  # before the check, so that it is the sha256 of what is checked
        agreement, _ = checked(made, Path(folder), card, version, batch, device)
        with KEEPING, writing(path):
            os.replace(made, file_behind(path))
            write_checksum(path, digest)
    takes = tuple(map(str, card.form.columns))
    return Packaged(**vars(agreement), path=path, batch=batch, joined=joined, sha256=digest, takes=takes)


def _joined(version: Version) -> int:
    """How many of its sites a region may join."""
    return sum(site.weight.joined is not None for site in frozen_sites(version.module).values())


def _compiled(
    folder: Path, card: Card, exported: Exported, joined: int, batch: tuple[int, int], device: torch.device
) -> Path:
    example = card.form.check_rows(device, _typical(batch))
    shapes = None
    if batch[0] < batch[1]:
        rows = torch.export.Dim("rows", min=batch[0], max=batch[1])
        shapes = {"columns": tuple({0: rows} for _ in example)}
    try:
        program = torch.export.export(exported, tuple(example), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch.export raises of all kinds on what it cannot trace
        raise ServeRefused(
            f"torch.export does not take this {card.model}",
            why=str(error).splitlines()[:5],
            way_out="serve it from Python (`save`, `load`), or write its forward without what is named",
        ) from error
    made = Path(folder) / "model.pt2"
    try:
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(made),
            inductor_configs=_options(joined, contents_of(exported, batch, _read(program))),
        )
    except LokaError:
        raise
    except Exception as error:  # compilers raise what they like
        raise ServeRefused(
            f"AOTInductor does not compile this {card.model}",
            why=str(error).splitlines()[:5],
            way_out="serve it from Python (`save`, `load`); for a GPU AOTInductor needs CUDA's headers (CUDA_HOME)",
        ) from error
    return made


def _read(program: torch.export.ExportedProgram) -> set[str]:
    """Names of the parameters, buffers and other tensors of modules that the program's code reads."""
    signature = program.graph_signature
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    return {
        names[node.name] for node in program.graph.find_nodes(op="placeholder") if node.name in names and node.users
    }


def _options(joined: int, contents: Contents) -> dict[str, Any]:
    """Of Inductor."""
    from torch._inductor import config

    from loka.compiler.packaged import PackagePass  # here, so that `import loka` loads no compiler

    mend_compilers()
    held = {"aot_inductor.metadata": {METADATA: json.dumps(encode(contents))}}
    if joined:
        return held | {"joint_custom_pre_pass": PackagePass(config.joint_custom_pre_pass)}
    # Without it Inductor keeps in float32 what eager rounds to bf16, and FP8 rounds otherwise.
    return held | {"emulate_precision_casts": True}


def _check(device: torch.device, plan: Plan, batch: tuple[int, int], *, by_rows: bool) -> None:
    why = [f"{path}: {reason}" for path, reason in unpackaged(plan).items()]
    if device.type not in ("cpu", "cuda"):
        why.append(f"on {device.type} no package was ever run")
    if by_rows:
        why.append("it has plans by numbers of rows, and a package has one: freeze with one plan")
    numbers = isinstance(batch, Sequence) and [type(rows) for rows in batch] == [int, int]
    if not numbers or not 1 <= batch[0] <= batch[1]:
        raise ServeRefused(f"batch={batch} is no range of rows", way_out="the least and the most, such as (1, 4096)")
    if why:
        raise ServeRefused(
            "this server cannot be packaged",
            why=why,
            way_out='plan again with loka.plan(..., target="package"), or serve it from Python',
        )
    if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        raise MissingLibrary("AOTInductor needs a C++ compiler", way_out="install g++, or name one by CXX")


def checked(
    package: Path,
    folder: Path,
    card: Card,
    version: Version,
    batch: tuple[int, int],
    device: torch.device,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Agreement, list[str]]:
    """How the package's answers agree with the version's, and the names of its constants. `folder`: for files of the
    check. `weights`: what it loads first.

    Raises WrongResults where they do not agree.
    """
    run = runner_of(card)
    sizes = tried(batch)
    inputs = {size: card.form.check_rows(device, size) for size in sizes}
    given = {f"{size}/{n}": column for size, columns in inputs.items() for n, column in enumerate(columns)}
    found, constants = answers_of(package, given, device, folder=folder, weights=weights)
    expected = [leaves(run(version.module, inputs[size])) for size in sizes]
    want = [torch.cat([leaf.cpu().flatten() for leaf in of_sizes]) for of_sizes in zip(*expected, strict=True)]
    got = [torch.cat([found[f"{size}/{place}"].flatten() for size in sizes]) for place in range(len(want))]
    apart = [error_of(one, other) for one, other in zip(got, want, strict=True)]
    # A region rounds once what eager code rounds twice, and a difference in the last bits moves values to the next FP8
    # value. So a package with regions is held to the bound of a server's graphs; one without has to agree more closely.
    why = disagreements(got, want, card.answers)
    if not _joined(version):
        bounds = [
            _most_apart(of_fp8, of_package.rms, [leaf.dtype, *_computed_in(version.module, run)])
            for of_fp8, of_package, leaf in zip(card.answers, apart, want, strict=True)
        ]
        why += [
            f"output {place}: by {of_package.mean_abs:.2e} on average, where FP8 itself changes it by "
            f"{of_fp8.mean_abs:.2e}; {most:.2e} is allowed"
            for place, (of_package, of_fp8, most) in enumerate(zip(apart, card.answers, bounds, strict=True))
            if of_package.mean_abs > most
        ]
    if why:
        raise WrongResults(
            "the package answers otherwise than the server",
            why=why,
            way_out=f"{'serve it from Python' if weights is None else ANEW}; please report it with the versions that "
            "`loka doctor` prints",
        )
    entries = [len(one) for one in want]
    agreement = Agreement(
        sizes=sizes,
        equal=1 - sum(one.changed * count for one, count in zip(apart, entries, strict=True)) / max(sum(entries), 1),
        mean_abs=max(one.mean_abs for one in apart),
        max_abs=max(one.max_abs for one in apart),
        sqnr_db=min(
            (sqnr_db(*finite_in_both(a, b)) for a, b in zip(got, want, strict=True) if b.is_floating_point()),
            default=math.inf,
        ),
    )
    return agreement, constants


def _most_apart(of_fp8: AnswerError, rms: float, dtypes: Iterable[torch.dtype]) -> float:
    """Mean |package - server| allowed of an output, as large as `rms`. Units are float32's, in which sums are kept;
    of what FP8 does not touch they are of the coarsest of `dtypes`, as a sum's last bit may round to its next value."""
    sums = torch.finfo(torch.float32).eps
    coarsest = max((torch.finfo(dtype).eps for dtype in dtypes if not of_fp8.mean_abs and _rounds(dtype)), default=sums)
    return max(SHARE_OF_FP8 * of_fp8.mean_abs, UNITS * max(sums, coarsest) * rms)


def _computed_in(module: nn.Module, run: Runner) -> set[torch.dtype]:
    return {parameter.dtype for parameter in module.parameters()} | ({run.autocast} if run.autocast else set())


def _rounds(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1


def _typical(batch: tuple[int, int]) -> int:
    """Rows of the example, for which kernels are laid out: many; and odd, as code for any number may not rely on
    what divides it. One row would be taken for a constant."""
    least, most = batch
    return max(most - 1 + most % 2, least, min(most, 2))


def tried(batch: tuple[int, int]) -> tuple[int, ...]:
    """Numbers of rows by which a package for `batch` is checked: all of them its own."""
    least, most = batch
    return tuple(sorted({least, min(least + 36, most), min(max(least, 4096), most)}))
