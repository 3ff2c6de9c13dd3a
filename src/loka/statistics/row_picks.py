"""Random rows of an operand, drawn on the CPU and brought to its device without waiting for that."""

import torch


def row_picks(rows: int, kept: int, generator: torch.Generator, device: torch.device) -> torch.Tensor | None:
    """`kept` of `rows`, drawn with replacement; None for all of them where there are no more."""
    if rows <= kept:
        return None
    return sent(torch.randint(rows, (kept,), generator=generator, device="cpu"), device)


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`host`, a tensor on the CPU, on `device`. A plain copy would wait for what is queued there."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
