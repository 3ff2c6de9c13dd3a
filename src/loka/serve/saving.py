"""A frozen model as a folder: `card.json`, `plan.json`, `weights.safetensors`, and nothing that runs code.

    weights.safetensors   site/NAME/weight FP8, site/NAME/scale, site/NAME/input_scale   what FP8 sites keep
                          state/KEY                                       the rest of the state dict
                          check/PLACE                                     outputs for the form's own rows
    precise.safetensors   state/KEY                                       where requests are shadowed
    graphs.json.xz        what the model computes in each bucket, in ops, where it answers by CUDA graphs

The card has the sha256 of each file and is put there last. The model's code is not saved (serve/loading.py).
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from loka.core.records.plan import Plan
from loka.core.storage.alone import alone_with
from loka.core.storage.files import file_behind, sha256_of_file, sync_folder, write_tensors, writing
from loka.serve.card import Card, Folder
from loka.serve.model.code import steady_data
from loka.serve.rows import leaves
from loka.serve.run import runner_of
from loka.serve.sites import frozen_sites
from loka.serve.version import Version

COMPARED = 64  # rows: what clamps and other rare branches do is seen in few of them
CARD, PLAN, WEIGHTS, PRECISE = "card.json", "plan.json", "weights.safetensors", "precise.safetensors"
GRAPHS = "graphs.json.xz"
FILES, _STAGED = (PLAN, WEIGHTS, PRECISE, GRAPHS), ".saving"


@torch.no_grad()
def save_version(folder: Path, card: Card, plan: Plan, version: Version, device: torch.device) -> None:
    """What the folder held is replaced once all that is new lies beside it, on the disk.

    Raises NotWritten where the disk refuses, and InUse where another process saves there; the folder is as it was.
    """
    staged, before = folder / _STAGED, folder / _STAGED / "before"
    with writing(folder), alone_with(folder / CARD, "saving", chosen="folder"):
        _put_back(before, folder)  # where a process was killed between renames
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        try:
            plan.save(staged / PLAN)
            write_tensors(staged / WEIGHTS, _content(card, version, device))
            if version.precise is not None:
                write_tensors(staged / PRECISE, _state(version.precise))
            if version.replays is not None:
                version.replays.written.save(staged / GRAPHS)
            files = {name: sha256_of_file(staged / name) for name in FILES if (staged / name).exists()}
            data = steady_data(version.module, runner_of(card), device, unsaved=True)
            Folder(card=card, files=files, data=data).save(staged / CARD)
            for name in (*FILES, CARD):
                file_behind(folder / name)  # raises for what is no file
            _put_in_place(staged, before, folder)
        finally:
            if not any(before.glob("*")):  # what could not be put back stays for the next save
                shutil.rmtree(staged, ignore_errors=True)


def _put_in_place(staged: Path, before: Path, folder: Path) -> None:
    """Moves the files of `staged` into `folder`; where that is interrupted, those of before lie there again."""
    new = [name for name in (CARD, *FILES) if (staged / name).exists()]
    before.mkdir()
    try:
        _move(folder, before, (CARD, *FILES))  # without a card a mixture is no server
        _move(staged, folder, (*FILES, CARD))
    except BaseException:  # Ctrl-C, too
        for name in new:
            if not (staged / name).exists():
                (folder / name).unlink(missing_ok=True)
        _put_back(before, folder)
        raise
    shutil.rmtree(before, ignore_errors=True)
    sync_folder(folder)


def _put_back(before: Path, folder: Path) -> None:
    """The card is the last that is put into a folder: where there is one, what was there before is not missed."""
    if not os.path.lexists(folder / CARD):
        _move(before, folder, (*FILES, CARD))


def _move(source: Path, target: Path, names: Sequence[str]) -> None:
    """Those of the files that are there."""
    for name in names:
        if os.path.lexists(source / name):
            os.replace(source / name, target / name)


def _content(card: Card, version: Version, device: torch.device) -> dict[str, torch.Tensor]:
    found = {}
    for name, site in frozen_sites(version.module).items():
        found[f"site/{name}/weight"] = site.weight.low.data
        found[f"site/{name}/scale"] = site.weight.low.scale
        if site.input_scale is not None:
            found[f"site/{name}/input_scale"] = site.input_scale
    outputs = check_outputs(card, version.module, device)
    return found | _state(version.module) | {f"check/{place}": leaf for place, leaf in enumerate(outputs)}


def _state(tree: nn.Module) -> dict[str, torch.Tensor]:
    """Copies: tensors that share memory have no place in the format, nor has what is none."""
    state = tree.state_dict().items()
    return {f"state/{key}": t.clone() for key, t in state if isinstance(t, torch.Tensor) and not t.is_meta}


def check_outputs(card: Card, tree: nn.Module, device: torch.device, rows: int = COMPARED) -> list[torch.Tensor]:
    """What the model, which is on `device`, returns for so many of the form's own rows."""
    run = runner_of(card)
    return [leaf.clone() for leaf in leaves(run(tree, card.form.check_rows(device, rows)))]
