"""Steps on many GPUs, before there are any; start at `across.py`."""

from loka.core.records.across import Across
from loka.core.records.network import Network
from loka.scaling.cluster.across import scale_across

__all__ = ["Across", "Network", "scale_across"]
