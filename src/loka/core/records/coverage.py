"""Which share of the matmul FLOPs of a step belongs to sites, and what the rest is."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from loka.core.storage.codec import record


@record(row=True)
@dataclass(frozen=True, kw_only=True)
class Uncovered:
    """Matmul FLOPs that belong to no site: where, in which op, and why.

    `parameter`: whether an operand is a parameter, or a view or cast of one.
    """

    where: str
    op: str
    flops: float
    parameter: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.where or 'the model'}, {self.op}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Matmul FLOPs of one training step, forward and backward, by site and by GEMM ("output", ...)."""

    sites: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    uncovered: tuple[Uncovered, ...] = ()

    @property
    def total(self) -> float:
        return sum(map(self.of_site, self.sites)) + sum(rest.flops for rest in self.uncovered)

    def of_site(self, site: str) -> float:
        return sum(self.sites.get(site, {}).values())

    @property
    def seen(self) -> float:
        """The share of the FLOPs with a parameter that belong to sites; 1 where there are no such FLOPs."""
        seen = sum(map(self.of_site, self.sites))
        missed = sum(rest.flops for rest in self.uncovered if rest.parameter)
        return seen / (seen + missed) if seen + missed else 1.0

    def lines(self) -> list[str]:
        """One line for all sites together, and one for each uncovered part, ordered by share."""
        total = self.total or 1.0
        sites = sum(map(self.of_site, self.sites))
        found = [f"{100 * sites / total:.1f} % of the step's matmul FLOPs are sites"]
        for rest in sorted(self.uncovered, key=lambda rest: -rest.flops):
            found.append(f"{100 * rest.flops / total:.1f} % are no site: {rest}")
        return found

    def planned_lines(self, in_fp8: Mapping[tuple[str, str], bool], eight_bits: str = "FP8") -> list[str]:
        """As `lines`, with the sites divided by a plan: into those GEMMs that run in FP8 (or in what `eight_bits`
        names) and the others, where that is decided.
        """
        total = self.total or 1.0
        low: dict[str, float] = {}
        kept = undecided = 0.0
        for site, gemms in self.sites.items():
            for gemm, flops in gemms.items():
                if (site, gemm) not in in_fp8:
                    undecided += flops
                elif in_fp8[site, gemm]:
                    low[gemm] = low.get(gemm, 0.0) + flops
                else:
                    kept += flops
        by_gemm = ", ".join(f"{gemm} {100 * flops / total:.1f} %" for gemm, flops in low.items())
        parts = f" ({by_gemm})" if by_gemm else ""
        first = (
            f"{100 * sum(low.values()) / total:.1f} % of the step's matmul FLOPs run in {eight_bits}{parts}, "
            f"{100 * kept / total:.1f} % are sites kept in hp, {100 * undecided / total:.1f} % sites without "
            "a decision"
        )
        return [first, *self.lines()[1:]]
