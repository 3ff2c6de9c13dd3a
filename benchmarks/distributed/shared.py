"""What the scripts here share: a plan by hand, arms in turns with their baseline, the kernels of a step."""

import argparse
import faulthandler
import gc
import json
import re
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1] / "regions"))
from arms import CANDIDATES as CANDIDATES
from records import append
from running import require_known, tell

import loka
from loka.compiler.joint_sites import IN_REGIONS, misfit
from loka.core.device import fingerprint
from loka.core.exceptions import first_line
from loka.core.exchange import ranks_of
from loka.core.problem import linear_problem
from loka.core.recipe import Gemm
from loka.core.recording import capture_stream, synced
from loka.core.records.plan import Decision
from loka.core.signature import ModelSignature
from loka.distributed.choice import Ways, compared
from loka.train import graphed

Step = Callable[[], object]
Made = tuple[Step, Callable[[], dict[str, Any]]]

WARM_UPS, PROFILED = 16, 3  # DistributedDataParallel takes 11 steps before it is captured
SENT = r"nccl\w*Kernel|^gloo:"
GROUPS = {  # the first that a kernel's name fits; all else is "other": the dense part and its optimizer
    "all_to_all": r"nccl\w*(SendRecv|AllToAll)|^gloo:all_?to_?all",
    "all_reduce": r"nccl\w*AllReduce|^gloo:all_?reduce",
    "all_gather": r"nccl\w*AllGather|^gloo:all_?gather",
    "reduce_scatter": r"nccl\w*ReduceScatter|^gloo:reduce_?scatter",
    "sent otherwise": SENT,
    "embedding": r"embedding|embs|bounds_check|fbgemm|permute|jagged|bucketize|RadixSort|linearize|cumsum",
}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--step", default="compile", choices=["compile", "eager", "graph"])
    parser.add_argument("--batch-size", type=int, default=6144)
    parser.add_argument("--seconds", type=float, default=150, help="of an arm; then all ends, with stacks")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--narrowest", type=int, default=512, help="side of a layer that is planned by hand")
    parser.add_argument("--rounds", type=int, default=15, help="of 4 steps; 0: compiles, and writes nothing")
    parser.add_argument("--out", type=Path, required=True)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    told = parser.parse_args()
    require_known(parser, told.device)
    return told


def within(seconds: float) -> None:
    """A rank that hangs ends with the stacks of its threads, and torchrun ends the others."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def planned(model: ModelSignature, told: argparse.Namespace, device: torch.device) -> loka.Plan:
    """That of `told.plan`; or by hand, all wide layers that fit into regions."""
    if told.plan:
        return loka.agree(loka.Plan.load(told.plan))
    names = IN_REGIONS if device.type == "cuda" else ("emulated:rowwise_e4m3_pow2",) * 3
    here, found = fingerprint(device), {}
    for path, layer in model.layers.items():
        sides = {"in_features": layer.in_features, "out_features": layer.out_features}
        if min(sides.values()) < told.narrowest or misfit(**sides):
            continue
        for gemm, name in zip(Gemm, names, strict=True):
            problem = linear_problem(gemm, rows=told.batch_size, **sides, dtype="bfloat16", target=here.target)
            made = Decision(path=path, problem=problem, candidate=name, reason="by hand")
            found[made.site] = made
    assert found, f"no layer has sides of {told.narrowest} and more"
    return loka.agree(loka.Plan(model=model, machine=here, budget=loka.Budget(), timed=False, decisions=found))


class Arms:
    """A baseline, then each arm against it: a line of JSON each, on disk before the next begins.

    `make(name)`: the step of an arm, and what tells of it after some steps.
    """

    def __init__(self, key: str, told: argparse.Namespace, make: Callable[[str], Made]) -> None:
        where = torch.cuda.get_device_name() if told.device != "cpu" else "CPU, gloo"
        self.key = f"{key} {told.batch_size} x {ranks_of()} {told.step} {where}"
        self.told, self.make, self.device = told, make, torch.device(told.device)

    def run(self, baseline: str, names: list[str]) -> None:
        self.ways: dict[str, Step] = {}
        for name in [baseline, *names]:
            within(self.told.seconds)
            found: dict[str, Any] = {"cell": f"{self.key} {name}", "torch": torch.__version__}
            began = time.monotonic()
            try:
                self._arm(baseline, name, found)
            except torch.AcceleratorError:
                raise  # CUDA is unusable after it
            except Exception as error:  # of all ranks; where it is of one, the others wait until `within`
                if baseline not in self.ways:
                    raise
                traceback.print_exc()
                found["failure"] = first_line(error)
            found["seconds"] = round(time.monotonic() - began, 1)
            tell(json.dumps({k: v for k, v in found.items() if k != "kernels"}))
            if dist.get_rank() == 0 and self.told.rounds:
                append(self.told.out, found)
            if name != baseline:
                self.ways.pop(name, None)
            gc.collect()
        faulthandler.cancel_dump_traceback_later()

    def _arm(self, baseline: str, name: str, found: dict[str, Any]) -> None:
        """What is known stays in `found` where something raises."""
        cuda, rounds = self.device.type == "cuda", self.told.rounds
        before = torch.cuda.memory_allocated() if cuda else 0
        step, more = self.make(name)
        for _ in range(WARM_UPS if rounds else 1):
            step()
        self.ways[name] = step
        if not rounds:
            return
        found |= more()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            step()
            self._wait()
            found["peak_mb"] = (torch.cuda.max_memory_allocated() - before) >> 20
        both = {way: self.ways[way] for way in (baseline, name)}
        timed = compared(both, self.device, self._in_turns, baseline=baseline)[name]
        for what, value, digits in (("step_us", timed.microseconds, 1), ("speedup", timed.speedup, 4)):
            found[what] = [round(x, digits) for x in (value.value, value.low, value.high)]
        found |= self._kernels(step, timed.microseconds.value)

    def _in_turns(self, ways: Ways, device: torch.device) -> dict[str, list[float]]:
        """Microseconds of a step of four in a row, on an idle device; ranks begin together."""
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(self.told.rounds):
            for way, step in ways.items():
                dist.all_reduce(torch.zeros(1, device=device))
                self._wait()
                began = time.perf_counter()
                for _ in range(4):
                    step()
                self._wait()
                found[way].append((time.perf_counter() - began) * 1e6 / 4)
        return found

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _kernels(self, step: Step, step_us: float) -> dict[str, Any]:
        """Rank 0's microseconds a step: of communication, of it with nothing beside it, and of groups."""
        cuda = self.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
            for _ in range(PROFILED):
                step()
            self._wait()
        kind = DeviceType.CUDA if cuda else DeviceType.CPU
        times: dict[str, float] = {}
        spans: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for event in seen.events() or []:
            if event.device_type == kind and not (cuda and getattr(event, "is_user_annotation", False)):
                at = event.time_range
                times[event.name] = times.get(event.name, 0.0) + (at.end - at.start) / PROFILED
                spans[bool(re.search(SENT, event.name))].append((at.start, at.end))
        groups = dict.fromkeys((*GROUPS, "other"), 0.0)
        for kernel, us in times.items():
            groups[next((g for g, names in GROUPS.items() if re.search(names, kernel)), "other")] += us
        sent = sum(end - start for start, end in spans[True]) / PROFILED
        alone = _covered(spans[False] + spans[True]) - _covered(spans[False])
        longest = sorted(times.items(), key=lambda kernel: -kernel[1])[:30]
        return {
            "comm_us": round(sent, 1) if sent else "no kernel of communication was seen",
            "comm_share": round(sent / step_us, 4),
            "exposed_us": round(alone / PROFILED, 1),
            "groups_us": {group: round(us, 1) for group, us in groups.items() if us},
            "kernels": {kernel[:90]: round(us, 1) for kernel, us in longest},
        }


def _covered(spans: list[tuple[float, float]]) -> float:
    """Microseconds in which there is at least one."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


class Tower(nn.Module):
    """Linear - ReLU; no nn.Sequential, whose forward Dynamo skips behind hooks."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def replicated(model: nn.Module, told: argparse.Namespace) -> DistributedDataParallel:
    """Built where a graph of its steps will be captured, if one will."""
    device = torch.device(told.device)
    captured = told.step == "graph" and device.type == "cuda"
    with synced(capture_stream(device) if captured else None):
        return DistributedDataParallel(model)


def trained(model: nn.Module, call: nn.Module, x: torch.Tensor, *, graph: bool) -> partial[Any]:
    """A step of AdamW under bf16 autocast on the rows in `x`, which may be others at each call. Not towards zero:
    a tower got there in 10,000 steps, and zeros are bit-equal."""
    fast = {"fused": True, "capturable": True} if x.is_cuda else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **fast)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, torch.bfloat16):
            y = call(x)
        loss = nn.functional.mse_loss(y.float(), x.roll(1, dims=1).relu())
        loss.backward()
        optimizer.step()
        return loss.detach()

    if graph:
        return partial(graphed(step, x, model=call, optimizers=optimizer, collectives=True), x)
    return partial(step, x)


def ran(step: partial[object], told: argparse.Namespace) -> str:
    """How it ran at last: as it was asked to, or the reason why not."""
    return getattr(step.func, "reason", None) or told.step
