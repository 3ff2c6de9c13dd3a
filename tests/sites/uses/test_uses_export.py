"""torch.export of converted models: both modes, in this process and, saved, in another one; finding E1.

A program holds the op, the site's name, candidates and parameters, and no handle into a process: where it
held one, a saved program ran with the weights of whatever model had that handle in the process that loaded
it.
"""

import pytest
import torch
from exported import run_all
from forced import OTHERS_WARN, plan_of, planned, ran
from foreign.registry import FOREIGN
from foreign.spec import call
from forked import SERVER
from oracle import assert_close
from sweeps import sweep
from torch import nn

pytestmark = OTHERS_WARN
ROWS = 32
NON_STRICT = [name for name, foreign in FOREIGN.items() if foreign.export_non_strict]
STRICT = [name for name, foreign in FOREIGN.items() if foreign.export_strict]
# A second each in strict mode, so one of each way of writing a GEMM.
STRICT_HERE = (
    "relu_tower", "functions", "slices", "columns", "chunks", "splits", "autoencoder_tied", "experts_bmm",
    "experts_einsum", "encoder_batch_first", "cross_attention", "shared_attention",
    "lora_parameters", "weight_norm", "deepctr_xdeepfm", "fuxictr_dcnv2_parallel",
    "torchrec_dlrm_dcn", "hf_gpt2_classifier",
)  # fmt: skip
ALWAYS = ("functions", "slices", "experts_bmm", "torchrec_dlrm_dcn")
SAVED = ("functions", "cross_attention")


def _given(foreign):
    inputs = foreign.inputs(ROWS)
    return ((), inputs) if isinstance(inputs, dict) else (inputs, {})


def _export(model, foreign, *, strict):
    args, kwargs = _given(foreign)
    return torch.export.export(model, args, kwargs, strict=strict)


def _leaves(result):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _sites_in(program):
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes if node.target is torch.ops.loka.site.default]
    return {node.args[3] for node in nodes}


def _check(name, *, strict):
    known = planned(name)
    foreign, model = known.foreign, known.converted()
    expected = _leaves(call(model, foreign.inputs(ROWS)))
    sites = {site.rpartition("/")[0] for site in ran(model, ("output",))}
    program = _export(known.converted(), foreign, strict=strict)
    assert _sites_in(program) == sites
    for result, wanted in zip(_leaves(call(program.module(), foreign.inputs(ROWS))), expected, strict=True):
        assert_close(result, wanted)


@pytest.mark.parametrize("name", sweep(NON_STRICT, (*ALWAYS, "lora_modules")))
def test_non_strict_has_every_site(name):
    """It fails where tracing passes an owner's mode by, so that a program computes in high precision."""
    _check(name, strict=False)


@pytest.mark.parametrize("name", sweep(STRICT_HERE, ALWAYS[:1]))
def test_strict_has_every_site(name):
    assert name in STRICT
    _check(name, strict=True)


@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
@pytest.mark.parametrize("name", sweep(("relu_tower", "slices", "encoder_batch_first"), ("slices",)))
def test_dynamic_shapes_by_the_names_of_the_original_forward(name, strict):
    """Also where the model itself owns the parameters, so that its own `forward` is replaced."""
    known = planned(name)
    inputs = known.foreign.inputs(ROWS)
    argument = "history" if name == "encoder_batch_first" else "x"
    shapes = {argument: {0: torch.export.Dim("rows", min=2, max=4096)}}
    program = torch.export.export(known.converted(), inputs, dynamic_shapes=shapes, strict=strict)
    for rows in (ROWS, 50):
        (given,) = known.foreign.inputs(rows)
        assert_close(program.module()(given), known.converted()(given))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpoint_modules", "checkpoint_function"])
def test_strict_export_takes_no_checkpoints_with_or_without_loka(name):
    """A known limit of torch, by the same error; when it goes, the flag of the foreign models goes too."""
    known = planned(name)
    errors = []
    for model in (known.foreign.build(), known.converted()):
        with pytest.raises(Exception) as caught:
            _export(model, known.foreign, strict=True)
        errors.append(type(caught.value))
    assert errors[0] is errors[1]


@pytest.mark.slow
def test_e1_saved_programs_in_a_fresh_process_beside_another_model(tmp_path):
    """Strict and not: each gives what it gave here, by FP8 kernels, whatever else is converted there."""
    plan_of(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), torch.randn(8, 64)).save(
        tmp_path / "other.json"
    )
    expected = {}
    for name in SAVED:
        known = planned(name)
        for strict in (False, True):
            stem = f"{name}-{'strict' if strict else 'non_strict'}"
            program = _export(known.converted().eval(), known.foreign, strict=strict)
            torch.export.save(program, tmp_path / f"{stem}.pt2")
            torch.save(_given(known.foreign), tmp_path / f"{stem}.inputs")
            with torch.no_grad():
                result = _leaves(call(known.converted().eval(), known.foreign.inputs(ROWS)))
            expected[stem] = (result, len(_sites_in(program)))
    found = _in_a_fresh_process(tmp_path)
    assert found.keys() == expected.keys()
    for stem, (results, sites) in expected.items():
        assert found[stem][1] >= sites > 0
        for result, wanted in zip(found[stem][0], results, strict=True):
            assert_close(result, wanted, what=stem)


def _in_a_fresh_process(folder):
    process = SERVER.Process(target=run_all, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == 0
    return torch.load(folder / "found", weights_only=False)
