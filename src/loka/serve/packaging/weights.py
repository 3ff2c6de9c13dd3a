"""Weights of a version as a file, which a process that runs a package takes in place of the package's own.

Nothing is compiled: `model.load_constants(torch.load(path, weights_only=True), check_full_update=True)` in Python, or
`load_constants` of the loader in C++. torch compares names alone, and these hold a digest of all names, shapes, dtypes
and candidates (`Exported`): weights for another package are refused by it.
"""

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loka.core.exceptions import FileRefused, ServeRefused, truncated
from loka.core.records.plan import Plan
from loka.core.storage.codec import decode
from loka.core.storage.files import file_behind, write_atomic, writing
from loka.serve.card import Card
from loka.serve.packaging.aot import ANEW, KEEPING, METADATA, Agreement, checked
from loka.serve.packaging.checksum import checksum_of, write_checksum
from loka.serve.packaging.exported import Contents, exported, in_code, tensors_of
from loka.serve.packaging.fresh import folder_beside
from loka.serve.run import runner_of
from loka.serve.version import Version


@dataclass(frozen=True, kw_only=True)
class PackagedWeights(Agreement):
    """Weights of a version for `package`, as the package answered with them. `sha256`: of the file, which stands in
    PATH.sha256 too."""

    path: Path
    package: Path
    sha256: str

    def __str__(self) -> str:
        return (
            f"{self.path}: weights for {self.package}; it was run with them, without loka, at {self.sizes} rows: "
            f"{self.summary}\n"
            f"sha256 {self.sha256}, in {checksum_of(self.path).name} too"
        )


@torch.no_grad()
def write_weights(
    package: Path, path: Path, card: Card, plan: Plan, version: Version, *, device: torch.device
) -> PackagedWeights:
    """Runs the package with the version's tensors, and then writes them.

    Raises:
        FileRefused: `package` cannot be read, or `server.package` did not write it.
        ServeRefused: the package is of another model or plan, or its code holds numbers that differ in this version; or
            `path` is the package.
        WrongResults: with these weights the package answers otherwise than the server; no file is left.
        NotWritten: the disk refuses the file.
    """
    contents = _contents_of(package)
    with writing(path):
        real = file_behind(path)
        if real.exists() and real.samefile(package):
            raise ServeRefused(f"{path} is the package", way_out="name another file, such as weights.pt")
    model = exported(version.module, plan, runner_of(card), device)
    if model.layout != contents.layout:
        raise ServeRefused(
            f"{package} is a package of another server",
            why=["its tensors have other names, shapes or dtypes than those of this model by its plan"],
            way_out=f"name the package that this server made, or {ANEW}",
        )
    held = tensors_of(model)
    why = [name.partition(".model.")[2] or name for name in _apart(contents.written, in_code(model, contents.written))]
    why += _apart(contents.kept, model.kept)
    if why:
        raise ServeRefused(
            f"the code of {package} holds numbers that differ in this version", why=truncated(why, 10), way_out=ANEW
        )
    with folder_beside(path) as folder:
        given = {name: _in_file(one) for name, one in held.items()}
        agreement, names = checked(package, Path(folder), card, version, contents.batch, device, given)
    data = io.BytesIO()
    torch.save({name: given[name] for name in names}, data)
    digest = hashlib.sha256(data.getbuffer()).hexdigest()
    with KEEPING:
        write_atomic(path, data.getvalue())
        write_checksum(path, digest)
    return PackagedWeights(**vars(agreement), path=path, package=package, sha256=digest)


def _apart(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [name for name in sorted({**one, **other}) if one.get(name) != other.get(name)]


def _in_file(tensor: torch.Tensor) -> torch.Tensor:
    """In memory of its own, as the file holds it. FP8 is stored as bytes, which are all that a package copies: torch's
    `pickle_load` in C++ knows no FP8 (2.13)."""
    copied = tensor.to("cpu", copy=True).contiguous()
    return copied.view(torch.uint8) if copied.is_floating_point() and copied.itemsize == 1 else copied


def _contents_of(package: Path) -> Contents:
    try:
        loader: Any = torch._C._aoti.AOTIModelPackageLoader
        metadata = loader.load_metadata_from_package(str(package), "model")
        return decode(Contents, json.loads(metadata[METADATA]))
    except Exception as error:  # torch raises of all kinds on what is no package
        reason = "it says nothing of LoKA" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        raise FileRefused(
            f"{package} is no package that takes weights",
            why=[reason],
            way_out="name a file that server.package wrote, by this version of LoKA or a later one",
        ) from error
