"""`loka scale calibrate`: the links of this cluster, measured by the ranks that torchrun started."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loka.cli.inputs import choose_device
from loka.cli.options import Device
from loka.cli.terminal import say
from loka.cli.torchrun import process_group, rank_and_ranks
from loka.core.records.network import Network
from loka.scaling.cluster.calibration import SIZES, calibrate


def calibrate_links(
    out: Annotated[Path, typer.Option(help="Network file to write, for `loka scale --network`.")],
    base: Annotated[
        Path | None,
        typer.Option(help="A network file, for what is not measured here: links between nodes, node size."),
    ] = None,
    max_mb: Annotated[int, typer.Option(min=1, help="Largest message, in MB.")] = SIZES[-1] >> 20,
    device: Device = None,
) -> None:
    """Under torchrun: measures the links between ranks, for `loka scale --network`."""
    known = None if base is None else Network.load(base)
    with process_group(choose_device(device)) as place:
        found = calibrate(place, base=known, most_bytes=max_mb << 20)
        if rank_and_ranks()[0] == 0:
            found.save(out)
            say(found.measured)
            for name, quantity in found.quantities.items():
                say(f"  {name}: {quantity}")
            say(f"written: {out}")
