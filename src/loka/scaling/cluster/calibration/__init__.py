"""The links of this cluster, measured; start at `measure.py`."""

from loka.scaling.cluster.calibration.measure import SIZES, calibrate

__all__ = ["SIZES", "calibrate"]
