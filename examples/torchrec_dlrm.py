"""TorchRec's DLRM_DCN in DistributedModelParallel and its pipeline, with FP8 in the layers behind the tables.

    python examples/torchrec_dlrm.py                        # on a CPU, FP8 emulated
    torchrun --nproc-per-node 2 examples/torchrec_dlrm.py   # two ranks, with GPUs if there are some

All but the lines marked LoKA is a script as TorchRec's users have it.
"""

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import loka
from loka.measurement import Settings

cuda = torch.cuda.is_available()
alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
dist.init_process_group("nccl" if cuda else "gloo", **alone)
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
rank = dist.get_rank()

FEATURES = [f"f{i}" for i in range(8)]
torch.manual_seed(0)
tables = EmbeddingBagCollection(
    tables=[
        EmbeddingBagConfig(name=f"t_{f}", embedding_dim=32, num_embeddings=1000, feature_names=[f]) for f in FEATURES
    ],
    device=device,
)
apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.02})
bare = DLRMTrain(DLRM_DCN(tables, 13, [64, 32], [128, 64, 1], 2, 32, dense_device=device))
model = DistributedModelParallel(bare, device=device)
dense = dict(in_backward_optimizer_filter(model.named_parameters()))
optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=1e-3))


def rows(steps: int, seed: int, size: int = 256) -> Iterator[Batch]:
    """Rows whose click depends on whether two of their ids are small."""
    generator = torch.Generator().manual_seed(10_000 * rank + seed)
    for _ in range(steps):
        ids = (torch.rand(len(FEATURES), size, generator=generator) ** 3 * 1000).long()
        clicked = ((ids[0] < 200) ^ (ids[1] < 200)).float()
        lengths = torch.ones(ids.numel(), dtype=torch.int64)
        sparse = KeyedJaggedTensor.from_lengths_sync(FEATURES, ids.flatten(), lengths)
        yield Batch(torch.randn(size, 13, generator=generator), sparse, clicked)


def trained(steps: int, seed: int) -> float:
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    batches, losses = rows(steps, seed), []
    for _ in range(steps):
        losses.append(pipeline.progress(batches)[0].item())
    return sum(losses[-5:]) / 5


with loka.Probe(model, every=4, effect_samples=0) as probe:  # LoKA: watches some of the first steps
    print(f"rank {rank}: loss before {trained(20, seed=0):.3f}")

# LoKA: loka.measure(probe.stats()) and loka.plan(report) are all it takes on GPUs, where kernels are timed. A
# CPU has no times, so here layers are forced, and the logit is left alone.
name = "torch:rowwise_e4m3" if cuda else "emulated:rowwise_e4m3"
few = Settings(min_draws=2, max_draws=2)
report = loka.measure(probe.stats(), device=device, candidates=[name], errors_only=True, settings=few)
plan = loka.plan(report, force={"*over_arch.model.1/*": "hp", "*dense_arch*": "hp", "*": name})
loka.convert(model, loka.agree(plan))  # LoKA: the same modules and parameters, alike on all ranks

print(f"rank {rank}: loss by plan {trained(20, seed=1):.3f}")
if rank == 0:
    print(str(plan).splitlines()[-2])
dist.destroy_process_group()
