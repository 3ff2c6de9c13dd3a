import numpy as np
import torch

from loka.data import CRITEO


def made_up(rows, seed=0):
    """Criteo-like rows: label, 13 counts or None, 26 hex strings or None."""
    rng = np.random.default_rng(seed)

    def row():
        dense = [None if rng.random() < 0.2 else int(rng.integers(-3, 5000)) for _ in range(13)]
        sparse = [None if rng.random() < 0.1 else f"{rng.integers(30):08x}" for _ in range(26)]
        return (int(rng.integers(2)), *dense, *sparse)

    return [row() for _ in range(rows)]


def lines(rows, separator):
    return [separator.join("" if value is None else str(value) for value in row) for row in rows]


def write_tsv(path, rows):
    path.write_text("".join(line + "\n" for line in lines(rows, "\t")))
    return path


def write_csv(path, rows, header=CRITEO.columns):
    path.write_text("\n".join([",".join(header), *lines(rows, ",")]))  # no newline at the end
    return path


def gather(source, batch_size=64, start=0):
    batches = list(source.batches(batch_size, start=start))
    return [torch.cat([getattr(b, part) for b in batches]) for part in ("dense", "sparse", "label")]


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
