"""Training on many GPUs with torch's own engines: FSDP2 gathers weights in FP8, gradients are sent by codecs, and
tables are sharded by TorchRec, or replicas keep them equal by exchanging the rows that they changed.
"""

from loka.distributed.choice import Choice
from loka.distributed.dense_sharding import average_gradients, replicated_tables, shard_dense
from loka.distributed.fp8_all_gather import Fp8AllGather, Gathered, fp8_all_gather
from loka.distributed.gather_choice import choose_gather
from loka.distributed.gradient_gate import choose_gradients
from loka.distributed.gradient_wire import GradientWire, send_gradients
from loka.distributed.tables.embedding_bags import EmbeddingBags, with_embedding_bags
from loka.distributed.tables.row_sync import RowSync, Traffic, row_sync
from loka.distributed.tables.sharded_tables import shard_tables

__all__ = [
    "Choice",
    "EmbeddingBags",
    "Fp8AllGather",
    "Gathered",
    "GradientWire",
    "RowSync",
    "Traffic",
    "average_gradients",
    "choose_gather",
    "choose_gradients",
    "fp8_all_gather",
    "replicated_tables",
    "row_sync",
    "send_gradients",
    "shard_dense",
    "shard_tables",
    "with_embedding_bags",
]
