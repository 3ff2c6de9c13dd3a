import copy
import dataclasses

import pytest
import torch
from gpu import nothing_synchronizes
from models import Encoder, batches, odd_mlp, train_steps
from sites import convert_layers
from sweeps import sweep
from torch import nn

import loka
from loka.core.device import fingerprint
from loka.core.exceptions import NoKernelFits, NotConverted, PlanMismatch
from loka.core.problem import linear_problem
from loka.core.recipe import Gemm
from loka.core.records.plan import Decision
from loka.measurement import Settings
from loka.nn import signature, sites_of
from loka.nn.site import site_forwards
from loka.planner.convert import check, fp8_layers

QUICK = Settings(max_draws=4)


def planned(model, device="cpu"):
    model.to(device)
    with loka.Probe(model, every=2) as probe:
        train_steps(model, 4, device=device)
    report = loka.measure(probe.stats(), device=device, settings=QUICK)
    if device == "cpu":
        return loka.plan(report)
    return loka.plan(report, force={"*": "torch:rowwise_e4m3"})


@pytest.mark.parametrize("build", sweep((Encoder, odd_mlp), [Encoder]))
def test_the_whole_loop_on_a_foreign_model(build, device, tmp_path):
    torch.manual_seed(0)
    model = build()
    plain_keys = list(model.state_dict())
    shape_of_things = [(name, type(module)) for name, module in model.named_modules()]
    decided = planned(model, device.type)
    decided.save(tmp_path / "plan.json")
    decided = loka.Plan.load(tmp_path / "plan.json")
    parameters = dict(model.named_parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = copy.deepcopy(model)

    assert loka.convert(model, decided) is model
    assert sites_of(model)
    assert [(name, type(module)) for name, module in model.named_modules()] == shape_of_things
    assert list(model.state_dict()) == plain_keys
    assert all(parameters[name] is value for name, value in model.named_parameters())

    losses = train_steps(model, 6, device=device.type)
    # e4m3 products carry 4 % noise (28 dB), on logits of order one: far below 0.05 in the loss.
    for fp8_loss, loss in zip(losses, train_steps(plain, 6, device=device.type), strict=True):
        assert fp8_loss == pytest.approx(loss, abs=0.05)
    assert losses != pytest.approx(train_steps(plain, 6, device=device.type), abs=1e-6)
    assert list(model.state_dict()) == plain_keys
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    fp8_sites = {d.site for d in decided.decisions.values() if d.candidate != "hp"}
    runs = {site: counts["runs"] for site, counts in loka.health_of(model).items()}
    assert set(runs) >= fp8_sites
    assert all(runs[site] == 6 for site in fp8_sites)
    loka.check_finite(model)

    assert loka.revert(model) is model
    assert [(name, type(module)) for name, module in model.named_modules()] == shape_of_things
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(name.startswith("loka") for module in model.modules() for name in vars(module))
    assert list(model.state_dict()) == plain_keys
    twin = build().to(device)
    twin.load_state_dict(model.state_dict())
    x = batches(model, 1)[0][0].to(device)
    for mode in (True, False):
        model.train(mode)
        twin.train(mode)
        with torch.autocast(device.type, torch.bfloat16, enabled=mode):
            assert torch.equal(model(x), twin(x))


@pytest.fixture(scope="module")
def mlp_plan():
    torch.manual_seed(0)
    return planned(odd_mlp())


def test_a_plan_for_another_model_is_refused_with_the_differences(mlp_plan):
    other = nn.Sequential(nn.Linear(13, 480), nn.ReLU(), nn.ReLU(), nn.Linear(480, 1000))
    with pytest.raises(PlanMismatch) as caught:
        loka.convert(other, mlp_plan)
    message = str(caught.value)
    assert "0 is 13 -> 480, bias in this model, 13 -> 479, bias there" in message
    assert "5 (1000 -> 1, bias) is missing in this model" in message
    assert not site_forwards(other)


def test_a_plan_for_another_machine_is_refused_with_the_difference(mlp_plan):
    elsewhere = dataclasses.replace(mlp_plan.machine, device="NVIDIA H200", target="sm_90", driver="580.1", cuda="13.0")
    model = odd_mlp()
    with pytest.raises(PlanMismatch, match="device: cpu here, NVIDIA H200 there") as caught:
        loka.convert(model, dataclasses.replace(mlp_plan, machine=elsewhere))
    assert "loka measure" in str(caught.value)
    older = dataclasses.replace(mlp_plan, machine=dataclasses.replace(mlp_plan.machine, torch="2.12.0"))
    with pytest.raises(PlanMismatch, match=r"2\.12\.0 there"):
        loka.convert(model, older)
    assert not site_forwards(model)


def test_another_driver_is_a_warning(mlp_plan):
    """Kernels come with torch and the libraries; `differences` of other uses still count it."""
    newer = dataclasses.replace(mlp_plan.machine, driver="590.2")
    assert mlp_plan.machine.differences(newer) == ["driver:  here, 590.2 there"]
    model = odd_mlp()
    with pytest.warns(UserWarning, match=r"timed under driver 590\.2"):
        loka.convert(model, dataclasses.replace(mlp_plan, machine=newer))
    assert site_forwards(model)


def test_a_library_counts_where_the_plan_names_its_kernels(mlp_plan):
    """One that was raced and lost where the plan was made need not be here."""
    elsewhere = dataclasses.replace(mlp_plan.machine, libraries={"torchao": "0.18.0"})
    plan = dataclasses.replace(mlp_plan, machine=elsewhere)
    model = odd_mlp()
    loka.convert(model, plan)
    loka.revert(model)
    site, decision = next(iter(plan.decisions.items()))
    named = dataclasses.replace(decision, candidate="torchao:tensorwise_e4m3")
    with pytest.raises(PlanMismatch, match=r"torchao: not installed here, 0\.18\.0 there"):
        loka.convert(model, dataclasses.replace(plan, decisions={**plan.decisions, site: named}))


def test_a_layer_that_no_plan_may_have_is_refused_with_its_reason(mlp_plan):
    with pytest.raises(PlanMismatch, match=r"3: torch\.float64 weights; LoKA knows"):
        loka.convert(odd_mlp().double(), mlp_plan)


def test_converting_twice_and_reverting_nothing(mlp_plan):
    model = odd_mlp()
    with pytest.raises(NotConverted, match="no site"):
        loka.revert(model)
    loka.convert(model, mlp_plan)
    with pytest.raises(NotConverted, match=r"already runs a plan\n  3 runs sites"):
        loka.convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ReLU(), model[3]), mlp_plan)  # of another model
    clone = copy.deepcopy(model)
    loka.revert(clone)
    assert site_forwards(model)
    assert not site_forwards(clone)


def test_compiled_models_convert_by_their_own_names(mlp_plan):
    torch._dynamo.reset()
    model = odd_mlp()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    loka.convert(compiled, mlp_plan)
    losses = train_steps(model, 3, call=compiled)
    assert all(loss == loss for loss in losses)
    assert any(counts["runs"] == 3 for counts in loka.health_of(compiled).values())


@pytest.mark.gpu
def test_a_cuda_graph_of_the_step_counts_its_replays():
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False)).cuda()
    convert_layers(model, ("torch:rowwise_e4m3",) * 3)
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            model(x).float().square().mean().backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    torch.cuda.synchronize()
    loka.nn.reset_health(model)
    for _ in range(5):
        graph.replay()
    assert {c["runs"] for s, c in loka.health_of(model).items() if s != "0/grad_input"} == {5}


@pytest.mark.gpu
def test_a_step_does_not_synchronize():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).cuda()
    convert_layers(model, ("torch:rowwise_e4m3",) * 3)
    x = torch.randn(32, 64, device="cuda")
    model(x).sum().backward()
    with nothing_synchronizes():
        model(x).sum().backward()


def test_a_decision_for_no_layer_is_refused_before_anything_changes(mlp_plan):
    name, decision = next((n, d) for n, d in mlp_plan.decisions.items() if d.candidate != "hp")
    lost = dataclasses.replace(decision, path="9")
    bent = dataclasses.replace(decision, problem=dataclasses.replace(decision.problem, n=7))
    for wrong, message in ((lost, "no such layer"), (bent, "does not fit")):
        model = odd_mlp()
        with pytest.raises(PlanMismatch, match=message):
            loka.convert(model, dataclasses.replace(mlp_plan, decisions={**mlp_plan.decisions, name: wrong}))
        assert not site_forwards(model)


def test_a_weight_that_tensor_parallelism_cuts_is_refused_by_name(mlp_plan):
    model, path = odd_mlp(), next(iter(fp8_layers(mlp_plan)))
    model.get_submodule(path).weight.device_mesh = "as a DTensor has"
    with pytest.raises(NoKernelFits, match=rf"(?s)not by FSDP2 alone.*{path}\.weight"):
        loka.convert(model, mlp_plan)
    assert not site_forwards(model)


def test_of_what_a_server_runs_gradients_need_no_kernel_here(mlp_plan):
    name, decision = next((n, d) for n, d in mlp_plan.decisions.items() if n.endswith("grad_input"))
    there = dataclasses.replace(decision, candidate="fbgemm:rowwise_e4m3")  # not installed
    plan = dataclasses.replace(mlp_plan, decisions={**mlp_plan.decisions, name: there})
    check(odd_mlp(), plan, (Gemm.OUTPUT,))
    with pytest.raises(NoKernelFits):
        loka.convert(odd_mlp(), plan)


def test_towers_converted_one_by_one_are_reverted_together(mlp_plan):
    towers = nn.ModuleDict({"a": loka.convert(odd_mlp(), mlp_plan), "b": loka.convert(odd_mlp(), mlp_plan)})
    loka.revert(towers)
    assert not site_forwards(towers)


@pytest.mark.parametrize(
    ("recipe", "regions", "joins"),
    [("rowwise_e4m3_pow2", True, True), ("rowwise_e4m3_pow2", False, False), ("rowwise_e4m3", True, False)],
)
def test_the_compiler_learns_of_regions_once_one_gemm_can_be_in_one(recipe, regions, joins):
    from torch._inductor import config

    model = nn.Sequential(nn.Linear(16, 16))
    problem = linear_problem(Gemm.OUTPUT, rows=4, in_features=16, out_features=16, dtype="float32", target="cpu")
    decision = Decision(path="0", problem=problem, candidate=f"emulated:{recipe}", reason="")
    plan = loka.Plan(
        model=signature(model),
        machine=fingerprint("cpu"),
        budget=loka.Budget(),
        timed=False,
        decisions={decision.site: decision},
    )
    assert set(plan.candidates("0").values()) == {decision.candidate, "hp"}
    with config.patch(joint_custom_pre_pass=None):
        loka.convert(model, plan, regions=regions)
        assert (config.joint_custom_pre_pass is not None) == joins
