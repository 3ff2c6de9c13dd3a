"""The zoo's tables as TorchRec's: a table for each sparse feature, in one EmbeddingBagCollection.

    ids [B, F] int64, or the same as a KeyedJaggedTensor -> tokens [B, F, dim]

Each bag holds one id, so what comes out is the row itself and the model's forward stays as it is. TorchRec's
pipeline wants jagged ids in the batch, because it sends them to the ranks that hold the tables before the
model is called; every other caller passes plain ids. The tables are views of the rows that the model had:
nothing is copied, and nothing here is imported before it is asked for.
"""

import functools
import importlib
import itertools
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from loka.core.exceptions import LokaError, MissingLibrary, first_line
from loka.zoo import Front
from loka.zoo.layers import Embeddings

_ALIGNED = 4  # fbgemm's table-batched embeddings take rows of multiples of four elements


def torchrec(module: str = "torchrec") -> Any:
    """A module of TorchRec, with fbgemm's operators loaded. Raises MissingLibrary where there is none."""
    try:
        importlib.import_module("fbgemm_gpu")
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # fbgemm built for another torch does not load
        raise MissingLibrary(
            "tables are sharded by TorchRec, and it cannot be imported",
            why=[first_line(error)],
            way_out="install torchrec and fbgemm-gpu built for this torch (docs/torchrec.md), or train with "
            "--engine torch, scale with --tables-by size",
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """TorchRec warns of defaults that are meant here, through the root logger too."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logging.disable(before)


class EmbeddingBags(nn.Module):
    """Stands in the place of the zoo's `front.embeddings`.

    Args:
        tables: weights [V, dim] of the F sparse features, in their order; they become the collection's.

    Attributes:
        features: names of the F sparse features, the keys of jagged ids.
        bags: the EmbeddingBagCollection, which TorchRec replaces by its sharded form.
    """

    def __init__(self, tables: Sequence[torch.Tensor]) -> None:
        super().__init__()
        _left_to_python()
        library = torchrec()
        self.features = [f"f{column}" for column in range(len(tables))]
        configs = [
            library.EmbeddingBagConfig(
                name=f"t{column}",
                embedding_dim=table.shape[1],
                num_embeddings=table.shape[0],
                feature_names=[self.features[column]],
            )
            for column, table in enumerate(tables)
        ]
        self.bags: nn.Module = library.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        for column, table in enumerate(tables):
            bag = self.bags.get_submodule(f"embedding_bags.t{column}")
            bag.weight = nn.Parameter(table.detach())

    def jagged(self, ids: torch.Tensor) -> Any:
        """Ids [B, F] as a KeyedJaggedTensor of bags of one."""
        rows, columns = ids.shape
        return torchrec().KeyedJaggedTensor(
            keys=self.features,
            values=ids.t().reshape(-1),
            lengths=torch.ones(rows * columns, dtype=torch.int64, device=ids.device),
            stride=rows,
            length_per_key=[rows] * columns,  # known here; TorchRec would read them back from the device
        )

    def forward(self, ids: Any, column: int | None = None) -> torch.Tensor:
        if column is not None:
            raise ValueError("a history is looked up row by row, not in bags; train it with --engine torch")
        if isinstance(ids, torch.Tensor) and type(self.bags.forward).__name__ == "PipelinedForward":
            raise LokaError(
                "TorchRec's pipeline has ids of the next batch on their way, and its model takes no others",
                way_out="call the model in a Callback, behind run.close(), or train with pipeline=False",
            )
        return _tokens(self.bags(self.jagged(ids) if isinstance(ids, torch.Tensor) else ids), self.features)


@functools.cache
def _left_to_python() -> None:
    """Whoever compiles a model with such tables gets graphs before and behind them: Dynamo fails in TorchRec's
    lookups with an error of its own. Of the class, so that copies of a module are right."""
    EmbeddingBags.forward = torch.compiler.disable(EmbeddingBags.forward)  # type: ignore[method-assign]


def embedding_bags_in(model: nn.Module) -> list[EmbeddingBags]:
    return [module for module in model.modules() if isinstance(module, EmbeddingBags)]


def _tokens(pooled: Any, features: list[str]) -> torch.Tensor:
    """In the order of features: a sharded collection returns them in that of its shards."""
    found = torchrec().KeyedTensor.regroup([pooled], [features])[0]
    return cast(torch.Tensor, found.unflatten(1, (len(features), -1)))


torch.fx.wrap("_tokens")  # the pipeline's tracer need not look into it


def with_embedding_bags(model: nn.Module) -> nn.Module:
    """`model` with an EmbeddingBagCollection in the place of the zoo's table, in place.

    A model of one's own that has a collection already stays as it is.

    Raises:
        LokaError: the model has neither, reads histories, or fbgemm cannot hold its rows.
        MissingLibrary: TorchRec or fbgemm cannot be imported.
    """
    collection = torchrec().EmbeddingBagCollection
    front = getattr(model, "front", None)
    if not isinstance(front, Front):
        if any(isinstance(module, collection) for module in model.modules()):
            return model
        raise LokaError(
            f"{type(model).__name__} has no tables that TorchRec can shard",
            why=["it has neither the zoo's `front` nor an EmbeddingBagCollection"],
            way_out="hold its tables in a torchrec.EmbeddingBagCollection, or train with --engine torch",
        )
    if not isinstance(front.embeddings, Embeddings):
        return model
    if front.history is not None:
        raise LokaError(
            f"{type(model).__name__} reads histories, which are sequences of rows and no bags",
            why=["TorchRec looks sequences up in an EmbeddingCollection, which no model of the zoo uses"],
            way_out="train it with --engine torch, or a model that reads no history (dlrm, dcnv2, wukong)",
        )
    if front.dim % _ALIGNED:
        raise LokaError(
            f"rows of {front.dim} elements cannot be trained by fbgemm",
            why=[f"its table-batched embeddings take multiples of {_ALIGNED}"],
            way_out="choose another size of the model, or train with --engine torch",
        )
    table = front.embeddings.table.weight.detach()
    is_trained = front.embeddings.table.weight.requires_grad
    ends = [*front.embeddings.offsets.tolist(), len(table)]
    parts = table.split([last - first for first, last in itertools.pairwise(ends)])
    front.embeddings = cast(Embeddings, EmbeddingBags(parts).requires_grad_(is_trained))
    return model
