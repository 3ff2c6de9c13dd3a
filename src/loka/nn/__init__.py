"""Sites, the modules BlockNorm and HardSwish, and functions that find linear layers and report on FP8 sites."""

from torch.nn import Hardswish as HardSwish  # x * relu6(x + 3) / 6: PyTorch's is the paper's

from loka.core.recording import eager_graphs
from loka.nn.block_norm import BlockNorm
from loka.nn.health import check_finite, fp8_runs, reset_health
from loka.nn.linears import find_linears, is_prediction, signature
from loka.nn.site import health_of, sites_of
from loka.nn.unwrap import unwrap

__all__ = [
    "BlockNorm",
    "HardSwish",
    "check_finite",
    "eager_graphs",
    "find_linears",
    "fp8_runs",
    "health_of",
    "is_prediction",
    "reset_health",
    "signature",
    "sites_of",
    "unwrap",
]
