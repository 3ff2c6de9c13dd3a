import importlib
import json
import random
from dataclasses import replace

import pytest
import torch.distributed as dist
from ranks import on_ranks
from reports import around, measured, report

import loka
from loka.core.device import Fingerprint, fingerprint
from loka.core.exceptions import PlanMismatch
from loka.core.problem import linear_problem
from loka.core.recipe import Gemm
from loka.core.records.report import SiteReport
from loka.core.signature import LinearShape, ModelSignature
from loka.planner import agree as public

SITES = 12
CANDIDATES = ("torch:rowwise_e4m3", "torch:tensorwise_e4m3", "torch_fast:rowwise_e4m3")


def shared_report():
    """Twelve layers whose candidates are a few percent apart, for this machine."""
    here = fingerprint("cpu")
    layers, sites = {}, {}
    random_times = random.Random(0)
    for index in range(SITES):
        path = f"mlp.{SITES - index}"  # not in alphabetical order
        layers[path] = LinearShape(in_features=1024, out_features=1024, bias=False)
        problem = linear_problem(
            Gemm.OUTPUT, rows=4096, in_features=1024, out_features=1024, dtype="bfloat16", target=here.target
        )
        times = {name: measured(28.0, random_times.uniform(48, 52), noise=0.001) for name in CANDIDATES}
        site = SiteReport(path=path, problem=problem, measurements={"hp": measured(55.0, 100.0), **times})
        sites[site.name] = site
    one = report({}, machine=here)
    return replace(one, model=ModelSignature(name="Net", layers=layers), sites=sites)


def with_noise(clean, seed):
    """The same report with every time multiplied by a factor of its own, 10 % apart."""
    noise = random.Random(seed)
    sites = {}
    for name, site in clean.sites.items():
        noisy = {}
        for candidate, found in site.measurements.items():
            us = found.microseconds.value * noise.lognormvariate(0, 0.1)
            noisy[candidate] = replace(found, microseconds=around(us, 0.001), speedup=around(100.0 / us, 0.001))
        sites[name] = replace(site, measurements=noisy)
    return replace(clean, sites=sites)


def as_bytes(plan):
    return json.dumps(plan.to_json()).encode()


def noisy_clocks(rank, folder):
    own = loka.plan(with_noise(shared_report(), seed=rank))
    agreed = loka.agree(own)
    again = loka.agree(agreed)
    assert as_bytes(again) == as_bytes(agreed)
    assert list(agreed.decisions) == list(own.decisions)
    return {"own": as_bytes(own), "agreed": as_bytes(agreed), "str": str(agreed)}


def misfits(rank, folder):
    """What this rank is told when a rank does not fit. One world for all cases, to save time."""
    own = loka.plan(shared_report())
    layers = {**own.model.layers, "mlp.3": LinearShape(in_features=1024, out_features=512, bias=False)}
    h200 = Fingerprint(device="NVIDIA H200", target="sm_90", driver="1", cuda="13.0", torch="2.11.0")
    mine = {
        "another model": replace(own, model=replace(own.model, layers=layers)),
        "another measurement": replace(own, machine=replace(own.machine, torch="2.9.0")),
    }
    found = {case: refusal(plan if rank == 1 else own) for case, plan in mine.items()}
    found["neither can run it"] = refusal(replace(own, machine=h200))
    if rank == 1:
        # The package's name `agree` is the function.
        module = importlib.import_module("loka.planner.collective_plan")
        module.fingerprint = lambda device: replace(fingerprint(device), device="NVIDIA H100", driver="570.1")
    found["another machine"] = refusal(own)  # both ranks hold the same file
    return found


def refusal(plan):
    try:
        loka.agree(plan)
    except PlanMismatch as error:
        dist.barrier()  # nobody hangs, nobody left early
        return str(error)
    return None


def in_a_subgroup(rank, folder):
    alone = dist.new_group([1])
    own = loka.plan(with_noise(shared_report(), seed=rank))
    if rank == 0:
        with pytest.raises(ValueError, match="not in the group"):
            loka.agree(own, group=alone)
        return {}
    assert as_bytes(loka.agree(own, group=alone)) == as_bytes(own)
    wrong = replace(own, machine=replace(own.machine, torch="2.9.0"))
    with pytest.raises(PlanMismatch, match="rank 1: machine: torch"):
        loka.agree(wrong, group=alone)
    return {}


def test_ranks_with_noisy_clocks_end_with_one_plan(tmp_path):
    first, second = on_ranks(noisy_clocks, 2, tmp_path)
    chosen = [[d["candidate"] for d in json.loads(rank["own"])["decisions"].values()] for rank in (first, second)]
    assert chosen[0] != chosen[1], "the noise has to matter, or there is nothing to agree on"
    assert first["agreed"] == second["agreed"] == first["own"]
    assert first["str"] == second["str"]


def test_a_rank_that_does_not_fit_stops_all_of_them(tmp_path):
    first, second = on_ranks(misfits, 2, tmp_path)
    shown = {
        "another model": "rank 1: model: mlp.3 is 1024 -> 512 in this model, 1024 -> 1024 there",
        "another machine": "rank 1: machine: device: NVIDIA H100 here, cpu there",
        "another measurement": "rank 1: its plan was measured elsewhere: torch: 2.9.0 here",
        "neither can run it": "rank 0: machine: device: cpu here, NVIDIA H200 there",
    }
    for case, line in shown.items():
        assert first[case] is not None, case
        assert first[case] == second[case], "every rank sees the whole list"
        assert line in first[case]
        assert ("rank 0:" in first[case]) == (case == "neither can run it"), "who fits is not accused"


def test_groups_within_the_world(tmp_path):
    on_ranks(in_a_subgroup, 2, tmp_path)


def test_alone_it_returns_the_plan():
    plan = loka.plan(shared_report())
    assert loka.agree(plan) is plan
    assert loka.agree is public
