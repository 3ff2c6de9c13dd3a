"""What a package answers in a process that cannot import loka, as where it will be served."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from loka.core.exceptions import WrongResults
from loka.core.storage.files import file_behind, tensors_from_bytes, tensors_to_bytes, writing

SECONDS = 600
"""For importing torch, loading the file and three calls, which take less than a minute on a slow host."""

_FRESH = """
import json
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "loka":
            raise ImportError("loka is not to be imported")
sys.meta_path.insert(0, Hidden())
import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves
device = torch.device(sys.argv[4])
if device.type == "cuda":
    torch.cuda.set_device(device)
model = torch._inductor.aoti_load_package(sys.argv[1], device_index=-1 if device.index is None else device.index)
held = load_file(sys.argv[5], device=sys.argv[4]) if sys.argv[5:] else None
named = [name for name in model.get_constant_fqns() if not name.startswith("_tensor_constant")]
if held is not None:
    model.load_constants({name: held[name] for name in named}, check_full_update=True)
given, found = load_file(sys.argv[2], device=sys.argv[4]), {}
for size in sorted({name.partition("/")[0] for name in given}):
    columns = [given[f"{size}/{place}"] for place in range(sum(n.startswith(size + "/") for n in given))]
    for place, leaf in enumerate(tree_leaves(model(*columns))):
        found[f"{size}/{place}"] = leaf.cpu().contiguous().clone()
assert not any(name.partition(".")[0] == "loka" for name in sys.modules)
save_file(found, sys.argv[3])
print(json.dumps(named))
"""


def folder_beside(path: Path) -> tempfile.TemporaryDirectory[str]:
    """For files that a check exchanges: where `path` is to lie, in a folder that is made if it lacks; of a link, where
    its file lies. Raises NotWritten where the disk refuses.
    """
    with writing(path):
        folder = file_behind(path).parent
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=folder)


def answers_of(
    package: Path,
    given: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    folder: Path,
    weights: Mapping[str, torch.Tensor] | None,
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Outputs by "ROWS/PLACE", for columns by "ROWS/PLACE", and the names of the package's constants. Files that it
    exchanges lie in `folder`. `weights`: constants by name, of which it loads those that the package has first.

    Raises:
        WrongResults: the process ends with an error or by a signal, or does not end.
        NotWritten: the disk refuses the rows.
    """
    rows, answers, held = (folder / f"{name}.safetensors" for name in ("rows", "answers", "weights"))
    with writing(rows):
        rows.write_bytes(tensors_to_bytes(given))
        if weights is not None:
            held.write_bytes(tensors_to_bytes(weights))
    command = [sys.executable, "-c", _FRESH, str(package), str(rows), str(answers), str(device)]
    command += [] if weights is None else [str(held)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        sizes = sorted({int(name.partition("/")[0]) for name in given})
        raise WrongResults(
            f"the package does not answer within {SECONDS} s in a process without loka",
            why=[f"it was given {', '.join(map(str, sizes))} rows on {device}"],
            way_out="package again where the machine is less busy, or with fewer rows, batch=(1, 512); or serve it "
            "from Python",
        ) from error
    if done.returncode:
        raise WrongResults(
            "the package does not run in a process without loka",
            why=[*done.stderr.splitlines()[-5:], f"it ended with {done.returncode}"],
            way_out="serve it from Python; or, where a signal ended it as it loaded, name by CXX a compiler that links "
            "libstdc++ dynamically, as torch does",
        )
    return tensors_from_bytes(answers.read_bytes()), json.loads(done.stdout.splitlines()[-1])
