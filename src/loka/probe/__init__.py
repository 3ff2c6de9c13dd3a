"""Learns where FP8 is safe: statistics of tensors in sampled training steps, and what FP8 would cost the model."""

from loka.probe.merging import gather_renewed, gather_stats, merge_stats
from loka.probe.model_effects.renewal import renew_effects
from loka.probe.online import Probe

__all__ = ["Probe", "gather_renewed", "gather_stats", "merge_stats", "renew_effects"]
