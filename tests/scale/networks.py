"""Networks of round numbers, whose times can be worked out by hand."""

from loka.core.records.network import Link, Network, Quantity


def exactly(value: float) -> Quantity:
    return Quantity(value=value, low=value, high=value, origin="assumed", comment="by hand")


def network(
    *,
    inside: tuple[float, float] = (2, 100),
    between: tuple[float, float] = (5, 10),
    per_node: int = 8,
    launch: float = 1,
    memory: float = 1000,
    share: float = 1,
) -> Network:
    """Links as (alpha in us, bandwidth in GB/s); every end lies at the value."""
    return Network(
        name="by hand",
        gpus_per_node=per_node,
        inside=Link(alpha_us=exactly(inside[0]), bandwidth_gbps=exactly(inside[1])),
        between=Link(alpha_us=exactly(between[0]), bandwidth_gbps=exactly(between[1])),
        launch_us=exactly(launch),
        memory_gbps=exactly(memory),
        elementwise_share=exactly(share),
    )
