"""The proof: models on ten million synthetic rows, annealed, bf16 against plans, naive FP8 and itself.

    python benchmarks/quality/proof.py --out runs/proof --device cuda
    python benchmarks/quality/proof.py --out /tmp/tiny --device cpu --rows 20000 --held-out 6000 \\
        --batch-size 500 --models dlrm --pairs 2 --workers 1

What is run, how often and by what it is judged was fixed beforehand
(`git show 541ddd5:benchmarks/quality/PROOF.md`). For each model

    probe    a run in bf16 with a seed of its own; then effects from fresh rows on the trained model
             (train/automatic/as_it_is.py), errors, and three plans: --ne 2e-4, --ne 5e-5, and `mixed`, with
             INT8. On the held-out rows the change of the trained model by each arm's forward: KL/H, and NE by
             the labels, in one table
    pairs    bf16, plan, tight, mixed, naive and nudged (bf16 again, weights nudged by 1e-4: A/A) from the same
             weights over the same rows; verdicts by validation/variance.py and verdicts.py

Tasks go to processes that share the device, or by turns those that $GPUS names, such as 0,1,2,3.
 What is done is kept: a second start does what is missing. The
summary, without predictions of single rows, is `--out`/summary.json; `proof_table.py` prints it.
"""

import argparse
import glob
import json
import multiprocessing
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import proof_runs
import torch
from proof_judge import changes_of, judged, summed
from proof_models import MODELS, model_named
from proof_settings import PROBE_SEED, Settings, parts, start, write
from torch import nn

from loka import Budget, convert, plan, revert
from loka.core.error import Estimate
from loka.core.numerics.label_rate import LabelRate
from loka.core.recipe import RECIPES
from loka.core.records.plan import Plan
from loka.core.records.report import Report
from loka.core.records.stats import Stats
from loka.graph.attach import detach
from loka.measurement import measure
from loka.measurement.predicted_kl import joint_kl, predicted_kl
from loka.measurement.settings import COARSE
from loka.nn.linears import signature
from loka.train.automatic.as_it_is import learn
from loka.validation.arms import by_recipe, nudged

PLANS = {"plan": 2e-4, "tight": 5e-5}  # budgets in KL/H, of FP8 alone
MIXED_SHARE = 5e-5  # of bf16's NE, what the plan with INT8 may cost; and a quarter of what FP8 everywhere does
FP8_FIRST = 0.6  # of that, for sites in FP8: what a planner with times would take where it fits
PLANNED = (*PLANS, "mixed")
BESIDE = ("naive", "nudged")  # arms that need no plan
ARMS = ("bf16", *PLANNED, *BESIDE)


def probe(settings: Settings, name: str) -> str:
    """The probed run of a model, its plans, and what each arm's forward does to the trained model."""
    folder, began = settings.folder(name), time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out, fresh = parts(settings)
    config = settings.config(PROBE_SEED)
    said: list[str] = []
    trained = proof_runs.train_arms(
        lambda: model_named(name, settings.history),
        [lambda model: None],
        train,
        held_out,
        config=config,
        say=said.append,
    )[0]
    seconds = {"train": time.perf_counter() - began}
    model, labels = trained.model, held_out.label.cpu().numpy()
    rate = LabelRate(positives=float(train.label.sum().item()), rows=train.rows)
    stats = learn(model, fresh, config=config, base_rate=rate)
    seconds["effects"] = time.perf_counter() - began - sum(seconds.values())
    kernel, int8 = ("torch", "torch_int8") if settings.device == "cuda" else ("emulated", "emulated")
    fp8 = [f"{kernel}:rowwise_e4m3", f"{kernel}:tensorwise_e4m3"]
    report, with_int8 = (
        measure(stats, device=settings.device, candidates=names, settings=COARSE, errors_only=True)
        for names in (fp8, [*fp8, f"{int8}:int8_row"])
    )
    seconds["errors"] = time.perf_counter() - began - sum(seconds.values())
    plans = {arm: plan(report, Budget(ne=ne, regions=False)) for arm, ne in PLANS.items()}
    in_full = proof_runs.evaluate(model, held_out, config, bf16=False)
    told = changes_of(in_full, trained.logits, labels)
    all_fp8 = plan(report, Budget(ne=None, regions=False))
    whole = summed(known_effects(stats, all_fp8.output_recipes))
    limit = min(MIXED_SHARE * told["ne"], whole[0] / 4)
    plans["mixed"] = mixed(report, with_int8, limit)
    for arm, found in plans.items():
        found.save(folder / f"{arm}.json")
    everywhere = {path: "tensorwise_e4m3" for path in linear_paths(model) if path in stats.layers}
    recipes: dict[str, Mapping[str, str]] = {arm: found.output_recipes for arm, found in plans.items()}
    recipes["naive"] = everywhere
    changes: dict[str, Any] = {}
    for arm, chosen in recipes.items():
        put_in = by_recipe("naive", rows=settings.batch_size).apply if arm == "naive" else None
        if put_in is None:
            convert(model, plans[arm], regions=False)
        else:
            put_in(model)
        changed = proof_runs.evaluate(model, held_out, config)
        detach(model) if put_in else revert(model)
        effects = {path: predicted_kl(stats.layers[path], RECIPES[recipe]) for path, recipe in chosen.items()}
        changes[arm] = {
            **changes_of(trained.logits, changed, labels),
            "predicted": summed(known_effects(stats, chosen)),
            "recipes": dict(Counter(chosen.values())),
            "predicted_joint": joint_kl(stats.layers, {p: RECIPES[r] for p, r in chosen.items()}),
            "sites": len(chosen),
            "unknown": [path for path, effect in effects.items() if effect is None],
            "largest": sorted(
                ((path, effect.value) for path, effect in effects.items() if effect), key=lambda e: -e[1]
            )[:4],
            "gemms": sum(d.candidate != "hp" for d in plans[arm].decisions.values()) if arm in plans else None,
            "of": len(plans["plan"].decisions),
        }
    seconds["changes"] = time.perf_counter() - began - sum(seconds.values())
    content = {
        "model": name,
        "bf16": told,
        "all_fp8_predicted": whole,
        "mixed_limit": limit,
        "changes": changes,
        "no_effect": {path: layer.no_effect for path, layer in stats.layers.items() if layer.no_effect},
        "seconds": seconds,
        "step": [trained.how, *said],
    }
    torch.save(model.state_dict(), folder / "probe.pt")
    stats.save(folder / "stats")
    report.save(folder / "report.json")
    write(folder / "probe.json", content)
    said_of = ", ".join(
        f"{arm} {c['sites']} sites KL/H {100 * c['kl'][0]:.4f} % (predicted {100 * c['predicted'][0]:.4f})"
        for arm, c in changes.items()
    )
    return f"{name} probed in {time.perf_counter() - began:.0f} s: {said_of}; {said}"


def known_effects(stats: Stats, recipes: Mapping[str, str]) -> list[Estimate]:
    effects = (predicted_kl(stats.layers[path], RECIPES[recipe]) for path, recipe in recipes.items())
    return [effect for effect in effects if effect is not None]


def mixed(fp8: Report, with_int8: Report, limit: float) -> Plan:
    """FP8 where it costs least, INT8 wherever else it fits: KL/H at most `limit`.

    Without times a planner takes what errs least, INT8 at every site; with them FP8 wherever the budget lets
    it, as its regions are faster. This goes by the second, so that the pairs are no better than users' plans.
    """
    first = plan(fp8, Budget(ne=FP8_FIRST * limit, regions=False))
    sites = [f"{path}/output" for path in first.output_recipes]
    force = {glob.escape(site): first.decisions[site].candidate for site in sites}
    return plan(with_int8, Budget(ne=limit, regions=False), force=force)


def linear_paths(model: nn.Module) -> list[str]:
    return list(signature(model).layers)


def train(settings: Settings, name: str, seed: int, arms: tuple[str, ...]) -> str:
    """`arms` of one seed, those that are missing."""
    folder, began = settings.folder(name), time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    missing = [arm for arm in arms if not logits_file(folder, arm, seed).exists()]
    if not missing:
        return f"{name} {seed} {arms}: there"
    rows, held_out, _ = parts(settings)
    said: list[str] = []
    found = proof_runs.train_arms(
        lambda: model_named(name, settings.history),
        [arm_of(settings, folder, arm) for arm in missing],
        rows,
        held_out,
        config=settings.config(seed),
        averaged=missing.index("bf16") if "bf16" in missing else None,
        say=said.append,
    )
    for arm, one in zip(missing, found, strict=True):
        np.savez(
            folder / f"{arm}-{seed}.part.npz",
            logits=one.logits,
            **({"mean_logits": one.mean_logits} if one.mean_logits is not None else {}),
        )
        (folder / f"{arm}-{seed}.part.npz").rename(logits_file(folder, arm, seed))
    took = time.perf_counter() - began
    return f"{name} seed {seed} {'+'.join(missing)}: {took:.0f} s, {said[0]}; {found[0].how}"


def arm_of(settings: Settings, folder: Path, arm: str) -> Callable[[nn.Module], object]:
    if arm == "bf16":
        return lambda model: None
    if arm == "nudged":
        return nudged().apply
    if arm == "naive":
        return by_recipe("naive", rows=settings.batch_size).apply
    made = Plan.load(folder / f"{arm}.json")
    if all(decision.candidate == "hp" for decision in made.decisions.values()):
        return lambda model: None
    return lambda model: convert(model, made, regions=False)


def logits_file(folder: Path, arm: str, seed: int) -> Path:
    return folder / f"{arm}-{seed}.npz"


def judge(settings: Settings, name: str, seeds: list[int]) -> str:
    """Verdicts of what is there of a model; kept in its folder."""
    folder = settings.folder(name)
    _, held_out, _ = parts(settings)
    found = judged(folder, list(ARMS), seeds, held_out.label.cpu().numpy())
    write(folder / "verdicts.json", found)
    lines = [
        f"{name} {arm}: {one['ne_percent']} {one['verdict']}; pairs {one['pairs']}"
        for arm, one in found["arms"].items()
    ]
    return "\n".join([f"{name}: {found['annealed']}", *lines])


def summarize(out: Path, settings: Settings, models: list[str]) -> None:
    content: dict[str, Any] = {"settings": vars(settings), "torch": torch.__version__, "models": {}}
    if settings.device == "cuda":
        content["gpu"] = torch.cuda.get_device_name()
    for name in models:
        files = {what: settings.folder(name) / f"{what}.json" for what in ("probe", "verdicts")}
        content["models"][name] = {what: json.loads(f.read_text()) for what, f in files.items() if f.exists()}
    write(out / "summary.json", content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS[:6]), choices=MODELS)
    parser.add_argument("--arms", nargs="+", default=list(ARMS[1:]), choices=ARMS[1:], help="besides bf16")
    parser.add_argument("--history", type=int, default=0, help="rows with sequences of up to so many ids")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=1221 * 8192)
    parser.add_argument("--held-out", type=int, default=305 * 8192)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=1e9, help="nothing is begun after these")
    given = parser.parse_args()
    began = time.perf_counter()
    settings = Settings(
        out=str(given.out),
        device=given.device,
        rows=given.rows,
        held_out=given.held_out,
        batch_size=given.batch_size,
        lr=given.lr,
        history=given.history,
    )

    def say(text: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {text}", flush=True)

    proof_runs.generate(
        given.out / "rows", rows=settings.generated, seed=0, history=given.history, workers=given.workers
    )
    say(f"{settings.generated} rows")
    seeds = list(range(given.first_seed, given.first_seed + given.pairs))
    planned, beside = (tuple(arm for arm in group if arm in given.arms) for group in (PLANNED, BESIDE))
    tasks: list[tuple[tuple[int, ...], str, Callable[..., str], tuple[Any, ...]]] = []
    left = dict.fromkeys(given.models, 2 * len(seeds) - 1)  # tasks after which a model is judged, less one

    def add(order: int, name: str, what: Callable[..., str], *arguments: Any) -> None:
        tasks.append(((order, given.models.index(name)), name, what, (settings, name, *arguments)))
        tasks.sort(key=lambda task: task[0])

    def after_probe(name: str) -> None:
        for seed in seeds:
            add(2 + 2 * (seed - seeds[0]), name, train, seed, planned)

    for name in given.models:
        for seed in seeds:
            add(1 + 2 * (seed - seeds[0]), name, train, seed, ("bf16", *beside))
        if (settings.folder(name) / "probe.json").exists():
            after_probe(name)
        else:
            add(0, name, probe)
    late = False
    running: dict[Future[str], tuple[str, Callable[..., str]]] = {}
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, mp_context=fresh, initializer=start, initargs=(settings,)) as pool:
        while tasks or running:
            if time.perf_counter() - began > given.seconds and not late:
                late = True
                tasks = [task for task in tasks if task[2] is judge]
                for name in [name for name, n in left.items() if n >= 0]:
                    add(0, name, judge, seeds)  # what is there; again when more is
            while tasks and len(running) < given.workers:
                _, name, what, arguments = tasks.pop(0)
                running[pool.submit(what, *arguments)] = name, what
            done, _ = wait(running, return_when=FIRST_COMPLETED, timeout=5)
            for job in done:
                name, what = running.pop(job)
                try:
                    say(job.result())
                except Exception:
                    say(f"{name} {what.__name__} FAILED: {traceback.format_exc(limit=-4)}")
                    continue
                if what is probe:
                    after_probe(name)
                elif what is train:
                    left[name] -= 1
                if what is train and (left[name] < 0 or late):
                    add(0, name, judge, seeds)
                summarize(given.out, settings, given.models)
        summarize(given.out, settings, given.models)
    say("done")


if __name__ == "__main__":
    main()
