"""Where is FP8 safe, and where is it fast: online statistics, offline measurement."""

from loka.probe.measure import measure
from loka.probe.merging import gather_stats, merge_stats
from loka.probe.online import Probe
from loka.probe.renewal import renew_effects
from loka.probe.settings import Settings

__all__ = ["Probe", "Settings", "gather_stats", "measure", "merge_stats", "renew_effects"]
