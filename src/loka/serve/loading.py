"""load: a server from a folder and a model of the class that was frozen.

The model brings the code; its weights do not matter. What it computes with the saved ones for the form's own
rows is compared with what was saved, since two models may have the same layers and differ between them.
"""

import importlib
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loka.core.compiling import few_collections, hash_of_triton
from loka.core.device import fingerprint, no_autocast
from loka.core.error import sqnr_db
from loka.core.exceptions import FileRefused, PlanMismatch, ServeRefused, truncated
from loka.core.numerics.reference import Quantized
from loka.core.recipe import Gemm
from loka.core.records.plan import Plan
from loka.core.signature import MODEL_OPTIONS
from loka.core.storage.files import read_tensors, sha256_of_file
from loka.kernels.gemm.registry import candidate_named
from loka.kernels.quantize.side import empty_scale
from loka.nn.unwrap import device_of
from loka.planner.convert import check
from loka.serve.build import frozen_tree, load_precise, skeleton_of
from loka.serve.by_rows import buckets_by_site
from loka.serve.card import Card, Folder
from loka.serve.graphs import wants_graphs
from loka.serve.model.absent import absent
from loka.serve.model.code import steady_data
from loka.serve.model.private import check_apart, kinds_of, own_copy
from loka.serve.model.written import WrittenGraphs
from loka.serve.run import runner_of
from loka.serve.saving import CARD, COMPARED, FILES, GRAPHS, PLAN, PRECISE, WEIGHTS, check_outputs
from loka.serve.server import Server
from loka.serve.sites import FrozenWeight, even_weight
from loka.serve.watch.agreement import disagreements, finite_in_both, same_bits
from loka.serve.watch.shadow import check_share

_LOG = logging.getLogger("loka.serve")
_AGAIN = "freeze the model and save it again"
_ROUNDED_DB = 40.0  # other code of the same formula agrees to more; HardSwish and SiLU to 20 to 26


@torch.inference_mode(False)
@torch.no_grad()
@no_autocast()
@few_collections()
def load(folder: Path | str, model: nn.Module, *, shadow: float = 0.0, graphs: bool | None = None) -> Server:
    """A server from a folder that `Server.save` wrote, on the device of `model`; its version is 1.

    Args:
        model: an instance of the class that was frozen. Its weights are not read; buffers that are in no state dict are
            taken from it. It stays as it is.
        shadow: as in `freeze`. Above 0 the folder must hold the weights in high precision too.
        graphs: as in `freeze`. Sites are joined into regions where the folder was frozen with graphs.

    Raises:
        FileRefused: the folder is missing or damaged, or holds no frozen model.
        PlanMismatch: the model, the machine or the versions differ from those it was frozen with.
        NoKernelFits: a kernel of the plan is missing here. WrongResults: a kernel returns wrong numbers here.
        ServeRefused: the model has other weights or computes something else; it cannot be copied, as in `freeze`; or a
            share is to be shadowed without the weights for that.
    """
    check_share(shadow)
    folder = Path(folder)
    record = Folder.load(folder / CARD)
    card = record.card
    bare = own_copy(model)
    device = device_of(bare)
    graphs = wants_graphs(graphs, device, card.scratch)
    with ThreadPoolExecutor(2) as aside:
        reading = aside.submit(_read, folder, record.files)
        if graphs:
            aside.submit(hash_of_triton())
            importlib.import_module("torch._inductor.compile_fx")
        tensors = reading.result()
    plan = Plan.load(folder / PLAN)
    differences = fingerprint(device).differences(card.machine)
    if differences:
        raise PlanMismatch(
            f"{folder} was frozen on {card.machine}, not here",
            why=differences,
            way_out="load it there, or measure, plan and freeze on this machine",
        )
    skeleton, state = skeleton_of(bare), _below("state/", tensors)
    _check_dtypes(card, skeleton, state)
    check(bare, plan, (Gemm.OUTPUT,))
    weights, scales = _weights(card, tensors, device, folder)
    in_hp = buckets_by_site(card.buckets, card.in_hp)
    tree = frozen_tree(_filled(skeleton, state, card, device), plan, weights, scales, (), in_hp)
    saved = _below("check/", tensors)
    rows = len(saved["0"]) if "0" in saved and saved["0"].dim() else COMPARED
    check_apart(model, lambda: check_outputs(card, tree, device, rows))
    _check_same(card, check_outputs(card, tree, device, rows), saved, folder, _other_modules(card, kinds_of(bare)))
    _tell_data(card, folder, record.data, steady_data(tree, runner_of(card), device, unsaved=True))
    precise = _precise(folder, record, skeleton, device) if shadow else None
    return Server(
        card=card,
        plan=plan,
        skeleton=skeleton,
        scales=scales,
        module=tree,
        precise=precise,
        shadow=shadow,
        graphs=graphs,
        device=device,
        written=WrittenGraphs.load(folder / GRAPHS) if graphs and GRAPHS in record.files else None,
    )


def _below(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _read(folder: Path, files: Mapping[str, str]) -> dict[str, torch.Tensor]:
    wrong = [f"{name} is not named in the card" for name in (PLAN, WEIGHTS) if name not in files]
    for name, digest in files.items():
        try:
            found = sha256_of_file(folder / name) if name in FILES else ""
        except OSError as error:
            wrong.append(f"{name} cannot be read ({error.strerror})")
            continue
        if found != digest:
            wrong.append(f"{name} is not the file that was saved: damaged, or of another folder")
    if wrong:
        raise FileRefused(f"cannot serve {folder}", why=wrong, way_out=_AGAIN)
    return read_tensors(folder / WEIGHTS, sha256=files[WEIGHTS], way_out=_AGAIN)


def _weights(
    card: Card, tensors: Mapping[str, torch.Tensor], device: torch.device, folder: Path
) -> tuple[dict[str, FrozenWeight], dict[str, torch.Tensor]]:
    weights, scales = {}, {}
    for name, site in card.sites.items():
        casts = candidate_named(site.candidate).recipe.casts(Gemm.OUTPUT)
        try:
            data, scale = tensors[f"site/{name}/weight"].to(device), tensors[f"site/{name}/scale"]
            if site.scale == "static":
                scales[name] = tensors[f"site/{name}/input_scale"].to(device)
        except KeyError as error:
            raise FileRefused(f"{folder} lacks {error.args[0]}", way_out=_AGAIN) from error
        assert casts is not None
        if site.even:
            whole = scale.to(device).flatten()[:1].repeat(max(site.sides))
            weights[name] = even_weight(data.contiguous(), whole, getattr(torch, site.dtype))
            continue
        placed = empty_scale(casts[1], (data.shape[0], data.shape[1]), device)
        placed.copy_(scale)  # as it lies in memory where kernels read it
        low = Quantized(data.contiguous(), placed, casts[1])
        weights[name] = FrozenWeight(low=low, sides=site.sides, dtype=getattr(torch, site.dtype))
    return weights, scales


def _filled(skeleton: nn.Module, state: Mapping[str, torch.Tensor], card: Card, device: torch.device) -> nn.Module:
    """A tree with the weights of `state`. Those that the card lists as dropped stay absent."""
    wanted = skeleton.state_dict(keep_vars=True)
    whole = _with_extra(skeleton, state)
    for key in card.dropped:
        if key in wanted:
            held = wanted[key]  # no parameter where the class has a state dict of its own
            whole[key] = held if isinstance(held, nn.Parameter) else absent(nn.Parameter(held, requires_grad=False))
    return load_precise(skeleton, whole, device, before=state, dropped=card.dropped)


def _with_extra(skeleton: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """With the state of the model's own that is no tensor, which no folder holds."""
    own = skeleton.state_dict(keep_vars=True).items()
    return {key: value for key, value in own if not isinstance(value, torch.Tensor)} | dict(state)


def _check_dtypes(card: Card, skeleton: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Raises ServeRefused where dtypes differ: the tensors of the code decide in which dtype the saved
    weights compute.
    """
    own = {key: value.dtype for key, value in skeleton.state_dict().items() if isinstance(value, torch.Tensor)}
    saved = {key: tensor.dtype for key, tensor in state.items()}
    saved |= {f"{name}.weight": getattr(torch, site.dtype) for name, site in card.sites.items()}
    why = [f"{key}: {own[key]}, saved {dtype}" for key, dtype in saved.items() if own.get(key, dtype) != dtype]
    if why:
        raise ServeRefused(
            f"this {card.model} has other dtypes than the one that was frozen",
            why=truncated(why, 5),
            way_out="model.to(dtype), or .float(), as it was when it was frozen",
        )


def _other_modules(card: Card, kinds: Mapping[str, str]) -> list[str]:
    """How the modules of a model differ from those that were frozen."""
    paths = [path for path in {**card.modules, **kinds} if card.modules.get(path) != kinds.get(path)]
    lines = [
        f"{path or 'the model'}: {kinds.get(path, 'nothing')}, frozen {card.modules.get(path, 'nothing')}"
        for path in paths
    ]
    return truncated(lines, 10)


def _check_same(
    card: Card, found: list[torch.Tensor], saved: Mapping[str, torch.Tensor], folder: Path, others: list[str]
) -> None:
    """`others`: modules that differ, which is no matter where answers differ by rounding alone."""
    for index, leaf in enumerate(found):
        want = saved.get(str(index))
        if want is None or len(saved) != len(found) or (want.shape, want.dtype) != (leaf.shape, leaf.dtype):
            raise ServeRefused(
                f"this model returns other outputs than the one in {folder}",
                way_out=f"give a {card.model} as it was when it was frozen",
            )
    wanted = [saved[str(index)] for index in range(len(found))]
    found = [leaf.cpu() for leaf in found]
    why = disagreements(found, wanted, card.answers)
    if why:
        raise ServeRefused(
            f"this model computes something else than the one in {folder}",
            why=[f"for the same {found[0].shape[0]} rows {reason}" for reason in why],
            way_out=f"give a {card.model} as it was when it was frozen: same code, options and buffers",
        )
    numbers = {index: leaf for index, leaf in enumerate(wanted) if leaf.is_floating_point() and leaf.numel()}
    blind = [index for index, leaf in numbers.items() if not leaf.isfinite().any()]
    if blind:
        _LOG.warning(
            "%s: outputs %s are NaN or infinite for all rows that this %s was compared by, which tell nothing of them",
            folder,
            ", ".join(map(str, blind)),
            card.model,
        )
    apart = {
        index: sqnr_db(*finite_in_both(*pair))
        for index, pair in enumerate(zip(found, wanted, strict=True))
        if not same_bits(*pair)
    }
    if others and any(agreement < _ROUNDED_DB for agreement in apart.values()):
        raise ServeRefused(
            f"this model computes something else than the one in {folder}: it is built of other modules",
            why=others,
            way_out=f"give a {card.model} as it was when it was frozen ({MODEL_OPTIONS})",
        )
    if apart:
        _LOG.warning(
            "%s: this %s answers by other bits than the one that was saved (outputs %s; they agree to %s dB): another "
            "number of threads, or other code or options that the check cannot tell from rounding",
            folder,
            card.model,
            ", ".join(map(str, apart)),
            ", ".join(f"{agreement:.1f}" for agreement in apart.values()),
        )


def _tell_data(card: Card, folder: Path, saved: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Rows of a check need not reach what a number is for, as a bound."""
    others = [name for name, data in saved.items() if found.get(name, data) != data]
    if others:
        _LOG.warning(
            "%s: this %s is not the one that was saved in %s, and no folder holds that: where it matters, the answers "
            "are others; give a %s as it was then",
            folder,
            card.model,
            ", ".join(truncated(others, 10)),
            card.model,
        )


def _precise(folder: Path, record: Folder, skeleton: nn.Module, device: torch.device) -> nn.Module:
    if PRECISE not in record.files:
        raise ServeRefused(
            f"{folder} holds no weights in high precision to shadow requests with",
            way_out="load it with shadow=0, or freeze with a share and save again",
        )
    state = _below("state/", read_tensors(folder / PRECISE, sha256=record.files[PRECISE], way_out=_AGAIN))
    return load_precise(skeleton, _with_extra(skeleton, state), device, before=state)
