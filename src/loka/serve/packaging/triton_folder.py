"""A package where NVIDIA's Triton Inference Server looks for models.

    REPOSITORY/NAME/config.pbtxt    inputs, outputs, batching
    REPOSITORY/NAME/1/model.pt2     the package; the next one is 2, and the server turns to the largest number
                     /model.pt2.sha256    for `sha256sum -c`; the server asks for model.pt2 alone

Platform `torch_aoti`: the PyTorch backend of the server runs AOTInductor's files itself, without Python. It
calls them by place, so inputs are INPUT__0, INPUT__1, ... in the order of the form's columns. Which column each is,
and which of the model's outputs, stands in `parameters`, which the server keeps and does not ask for: two columns of
one dtype and shape in another order would otherwise make the same text.
"""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from loka.core.exceptions import ServeRefused
from loka.core.storage.alone import alone_in
from loka.core.storage.files import sha256_of_file, write_atomic, writing
from loka.serve.packaging.checksum import write_checksum
from loka.serve.rows import Form, leaves, names

TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "bfloat16": "TYPE_BF16",
}
CONFIG, PACKAGE = "config.pbtxt", "model.pt2"
_NAMED = 'parameters [{ key: "'  # how the lines begin that say which column an input is


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How the server joins requests.

    Attributes:
        most: rows of a batch, as many as the package takes.
        delay_us: how long a request may wait for others, in microseconds.
    """

    most: int
    delay_us: int = 0


def config_of(name: str, form: Form, answer: Any, batching: Batching) -> str:
    """The text of config.pbtxt; form and order of the fields are those of the server's model_config.proto.

    Args:
        answer: what the model returns for some rows: tensors [rows, ...], or tuples, lists and dicts of them. They
            lie on the kind of device that the package is for.

    Raises:
        ServeRefused: the name is none for a folder; a dtype that the server has not; an output without rows.
    """
    why = []
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        why.append(f"the name {name!r}: letters, digits, `.`, `-` and `_`, beginning with a letter, a digit or _")
    outputs = leaves(answer)
    told = [(f"the input {column.name}", column.dtype, column.sides) for column in form.columns]
    for place, output in enumerate(outputs):
        dtype = str(output.dtype).removeprefix("torch.")
        told.append((f"output {place}", dtype, tuple(output.shape[1:])))
        if not output.dim():
            why.append(f"output {place} is one number for all rows")
    known = ", ".join(TYPES)
    why += [f"{what} is {dtype}: the server has {known}" for what, dtype, _ in told if dtype not in TYPES]
    if why:
        raise ServeRefused(
            "Triton Inference Server cannot take this model",
            why=why,
            way_out="another --name, other dtypes in the model's forward, or one value a row",
        )
    kind = "KIND_GPU" if any(output.is_cuda for output in outputs) else "KIND_CPU"
    inputs = len(form.columns)
    lines = [f'name: "{name}"', 'platform: "torch_aoti"', f"max_batch_size: {batching.most}"]
    for place, (_, dtype, sides) in enumerate(told):
        side, number = ("input", place) if place < inputs else ("output", place - inputs)
        # Dimensions behind the rows. None at all has to be said as one that is reshaped away.
        dims = f"dims: [ {', '.join(map(str, sides))} ]" if sides else "dims: [ 1 ] reshape { shape: [ ] }"
        named = f'name: "{side.upper()}__{number}"'
        lines.append(f"{side} [{{ {named} data_type: {TYPES[dtype]} {dims} }}]")
    lines += [
        f"dynamic_batching {{ max_queue_delay_microseconds: {batching.delay_us} }}",
        f"instance_group [{{ count: 1 kind: {kind} }}]",
    ]
    places = [(f"INPUT__{place}", column.name) for place, column in enumerate(form.columns)]
    places += [(f"OUTPUT__{place}", key) for place, key in enumerate(names(answer))]
    # A string of JSON is one of protobuf's text form, too.
    lines += [
        f'{_NAMED}{place}" value {{ string_value: {json.dumps(key, ensure_ascii=False)} }} }}]' for place, key in places
    ]
    return "\n".join(lines) + "\n"


def add_version(package: Path, repository: Path, name: str, config: str) -> Path:
    """Puts the package beside the versions that are there, under the next number; returns its folder.

    A server that watches the repository sees a version whole or not at all, and never one without a form.

    Raises:
        ServeRefused: the model is there with another form, which its clients would notice first; or of before
            folders told which column an input is.
        InUse: another process publishes it.
        NotWritten: the disk refuses; there is no such version then.
    """
    folder = repository / name
    with writing(folder), alone_in(folder, "publishing"):
        written = folder / CONFIG
        if written.exists() and (there := written.read_text(encoding="utf-8")) != config:
            _refuse(written, there, config)
        if not written.exists():
            write_atomic(written, config.encode())
        versions = [int(one.name) for one in folder.iterdir() if one.is_dir() and one.name.isdecimal()]
        final = folder / str(max(versions, default=0) + 1)
        unfinished = folder / f".{final.name}.unfinished.d"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            with writing(final):
                unfinished.mkdir()
                shutil.copyfile(package, unfinished / PACKAGE)
                write_checksum(unfinished / PACKAGE, sha256_of_file(package))
                os.replace(unfinished, final)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    return final


def _refuse(written: Path, there: str, config: str) -> NoReturn:
    lines = config.split("\n")
    added = [line for line in lines if line.startswith(_NAMED)]
    if there == "\n".join(line for line in lines if line not in added):
        raise ServeRefused(
            f"{written} does not say which column each input is, nor which output: it is of before LoKA noted them",
            why=["now", *added],
            way_out="where its clients send and read them in this order, add these lines to the end of that file; else "
            "another --name, or remove that folder",
        )
    raise ServeRefused(
        f"{written} is of a model with another form, another order of inputs or outputs, or other batching",
        why=["there", *there.splitlines(), "now", *config.splitlines()],
        way_out="another --name, or remove that folder",
    )
