"""Where is FP8 safe, and where is it fast: online statistics, offline measurement."""

from loka.probe.measure import Settings, measure
from loka.probe.online import Probe

__all__ = ["Probe", "Settings", "measure"]
