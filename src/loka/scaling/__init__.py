"""Will it help? Sites, FLOPs and times of a model before it has run; start at `scale.py`, for many GPUs at
`cluster/across.py`."""

from loka.core.records.scale import Scale
from loka.scaling.scale import scale
from loka.scaling.stored import gpus

__all__ = ["Scale", "gpus", "scale"]
