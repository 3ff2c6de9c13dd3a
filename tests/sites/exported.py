"""Runs saved programs in a process where no model of them was built. Beside them another model is converted
first, which is what finding E1 needs.
"""

import torch

import loka


def run_all(folder):
    """Writes what each program returns, and how often candidates were launched for it."""
    other = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    plan = loka.Plan.load(folder / "other.json")
    loka.convert(other, plan)
    other(torch.randn(8, 64))
    found = {}
    for path in sorted(folder.glob("*.pt2")):
        before = sum(loka.kernel_runs().values())
        args, kwargs = torch.load(folder / f"{path.stem}.inputs", weights_only=False)
        result = torch.export.load(path).module()(*args, **kwargs)
        launched = sum(loka.kernel_runs().values()) - before
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        found[path.stem] = ([tensor.detach() for tensor in tensors], launched)
    torch.save(found, folder / "found")
