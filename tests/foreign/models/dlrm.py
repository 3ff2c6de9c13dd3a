"""TorchRec's DLRM, DLRM_DCN and DLRMTrain, unsharded, as the library has them.

Three features of 32, two of them ragged. The first layer is 13 wide as on Criteo, DLRM's interaction 38.
"""

import torch

from foreign.spec import generator, per_row

FEATURES, DIM, DENSE, RANK, LAYERS = 3, 32, 13, 32, 2
NAMES = [f"f{i}" for i in range(FEATURES)]


def _tables():
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t{i}", embedding_dim=DIM, num_embeddings=50, feature_names=[name])
            for i, name in enumerate(NAMES)
        ]
    )


def dlrm_dcn():
    from torchrec.models.dlrm import DLRM_DCN

    return DLRM_DCN(_tables(), DENSE, [64, DIM], [64, 32, 1], LAYERS, RANK)


def dlrm():
    from torchrec.models.dlrm import DLRM

    return DLRM(_tables(), DENSE, [64, DIM], [64, 32, 1])


def dlrm_train():
    from torchrec.models.dlrm import DLRMTrain

    return DLRMTrain(dlrm_dcn())


def features(rows):
    """Dense features [rows, 13] and a KeyedJaggedTensor: one id of the first feature, up to three else."""
    from torchrec import KeyedJaggedTensor

    drawn = generator()
    ragged = torch.randint(0, 4, (FEATURES - 1, rows), generator=drawn)
    lengths = torch.cat([torch.ones(rows, dtype=torch.int64), ragged.flatten()])
    values = torch.randint(50, (int(lengths.sum()),), generator=drawn)
    sparse = KeyedJaggedTensor.from_lengths_sync(keys=NAMES, values=values, lengths=lengths)
    return torch.randn(rows, DENSE, generator=drawn), sparse


def batch(rows):
    from torchrec.datasets.utils import Batch

    dense, sparse = features(rows)
    return (Batch(dense_features=dense, sparse_features=sparse, labels=torch.arange(rows) % 2),)


_BOTTOM = DENSE * 64 + 64 * DIM
_CROSS = LAYERS * 2 * RANK * (FEATURES + 1) * DIM
_DCN = _BOTTOM + _CROSS + (FEATURES + 1) * DIM * 64 + 64 * 32 + 32

_LIBRARY = ("torchrec",)
MODELS = [
    per_row(
        "torchrec_dlrm_dcn",
        dlrm_dcn,
        features,
        _DCN,
        needs=_LIBRARY,
        notes="LowRankCrossNet: F.linear on the members of two ParameterLists.",
    ),
    per_row(
        "torchrec_dlrm",
        dlrm,
        features,
        _BOTTOM + 38 * 64 + 64 * 32 + 32,
        needs=_LIBRARY,
        notes="The interaction's bmm has no parameter.",
    ),
    per_row(
        "torchrec_dlrm_train",
        dlrm_train,
        batch,
        _DCN,
        needs=_LIBRARY,
        loss=lambda output: output[0],
        logits=lambda output: output[1][1],
        export_strict=False,  # pytree does not know Batch
        export_non_strict=False,
        notes="DLRMTrain of DLRM_DCN: forward returns (loss, (loss, logits, labels)).",
    ),
]
