import pytest
import torch
from converted import JOINED, error, gradients
from foreign.registry import FOREIGN
from foreign.spec import Foreign, call, generator, of_logits, seeded, train_step
from joint import JointBackend
from sweeps import sweep

import loka
from loka.compiler.gemms import region_gemm
from loka.compiler.joint_sites import misfit
from loka.graph.attach import attach
from loka.nn.site_ops import site_forward
from loka.zoo import HistoryTable, build, dense_part, takes_history

FAMILIES = (
    "relu_tower", "batchnorm_tower", "used_twice", "experts_bmm", "encoder_norm_first", "lora_modules",
    "deepctr_autoint", "deepctr_dcn_mix", "fuxictr_dcnv2_stacked", "checkpoint_modules", "torchrec_dlrm_dcn",
    "hf_gpt2_classifier",
)  # fmt: skip


ALWAYS = ("batchnorm_tower", "used_twice", "torchrec_dlrm_dcn")
READERS = ("kunlun", "interformer", "hstu", "hstu:hybrid", "dhen", "mmoe")


def of_zoo(name):
    kind, _, size = name.partition(":")
    reads = takes_history(kind)
    sizes = {"size": size or "small", "dense_features": 16, "vocab_sizes": (1,) * 3, "tasks": 2}

    def inputs(rows):
        drawn = generator()
        floats = [torch.randn(rows, *shape, generator=drawn) for shape in ((16,), (3, 16), (32, 16))]
        return (*floats, torch.arange(rows).clamp(max=32))[: 4 if reads else 2]  # lengths: none, all

    made = seeded(lambda: dense_part(build(kind, **sizes, history=HistoryTable(column=2) if reads else None)))
    return Foreign(name=name, build=made, inputs=inputs, loss=of_logits())


@pytest.mark.parametrize("name", sweep((*FAMILIES, *READERS), ALWAYS))
def test_planned_and_joined_agree(name):
    foreign = of_zoo(name) if name in READERS else FOREIGN[name]
    foreign.skip_without_libraries()
    probed = foreign.build()
    with loka.Probe(probed, every=1, effect_samples=0) as probe:
        train_step(foreign, probed)
    stats = probe.stats()
    layers = stats.model.layers
    plain, eager, joined = (foreign.build() for _ in range(3))
    for model in (eager, joined):
        attach(model, layers, dict.fromkeys(stats.layers, (JOINED,) * 3), join=True)
    backend = JointBackend()
    losses = []
    for step in (plain, eager, torch.compile(joined, backend=backend)):
        # The truth is float32: on a CPU bfloat16's eager LayerNorm loses a third of its bias's gradient.
        with torch.autocast("cpu", torch.bfloat16, enabled=name in READERS and step is not plain):
            loss = foreign.loss(call(step, foreign.inputs(48)))
        loss.backward()
        losses.append(loss.detach())
    fitting = {path for path in stats.layers if not misfit(layers[path].in_features, layers[path].out_features)}
    assert fitting
    listed = loka.regions(joined)
    assert {site for region in listed.applied for site in region} == fitting
    assert set(listed.apart) == set(stats.layers) - fitting
    assert all("multiple of 16" in reason for reason in listed.apart.values())
    assert backend.count(region_gemm) >= 2 * len(fitting)
    assert (backend.count(site_forward) > 0) == bool(listed.apart)
    exact, one_by_one, together = (gradients(m) for m in (plain, eager, joined))
    assert set(together) == set(exact)
    assert error(losses[2], losses[0]) <= 1.5 * error(losses[1], losses[0]) + 0.01
    for path, truth in exact.items():  # the same rounding, at other places: as good as site by site
        assert error(together[path], truth) <= 1.5 * error(one_by_one[path], truth) + 0.02, path
