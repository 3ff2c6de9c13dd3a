"""Quality with honest intervals: pairs of runs, FP8 against bf16, and a verdict."""

from loka.validation.paired import AcrossPairs, PairedDifference, across_pairs, paired_difference, verdict

__all__ = ["AcrossPairs", "PairedDifference", "across_pairs", "paired_difference", "verdict"]
