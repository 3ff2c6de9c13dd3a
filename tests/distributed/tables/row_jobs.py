import copy
import importlib
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

from loka.core.exceptions import LokaError
from loka.distributed import row_sync
from loka.train.optim import RowwiseAdagrad

ROWS, WIDTH = 200, 24
module = importlib.import_module("loka.distributed.tables.row_sync")  # the function has its name


class Tables(nn.Module):
    """Two tables, one looked up in bags; the loss is linear in them, so steps do not depend on them."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.one = nn.Embedding(ROWS, WIDTH, dtype=dtype)
        self.bag = nn.EmbeddingBag(ROWS // 2, WIDTH, mode="sum", dtype=dtype)
        self.frozen = nn.Embedding(3, WIDTH).requires_grad_(False)

    def forward(self, ids, direction):
        return (self.one(ids) * direction).sum() + (self.bag(ids[:, None] // 2) * direction).sum()


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(0, ROWS // 4, (16,), generator=generator) + rank * ROWS // 8
    return ids, torch.randn(16, WIDTH, generator=generator)


@dataclass(frozen=True)
class Trained:
    steps: int
    settings: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    optimizer: str = "SGD"

    def __call__(self, rank, folder):
        torch.manual_seed(0)
        model = Tables(self.dtype)
        first = copy.deepcopy(model.state_dict())
        kind = RowwiseAdagrad if self.optimizer == "row-wise" else getattr(torch.optim, self.optimizer)
        optimizer = kind([model.one.weight, model.bag.weight], lr=0.01)
        sync = row_sync(model, optimizer=optimizer, **self.settings)
        counted = []
        for step in range(self.steps):
            optimizer.zero_grad()
            model(*batch(rank, step)).backward()
            optimizer.step()
            sync.step()
            counted.append(model.one.weight.double().sum().item())
        before = copy.deepcopy(model.state_dict())
        sync.flush()
        sync.remove()
        return {
            "sums": counted,
            "before": told(before),
            "after": told(model.state_dict()),
            "states": [told(state) for state in optimizer.state.values()],
            "first": told(first),
            "traffic": vars(sync.traffic),
        }


def _each(jobs, rank, folder):
    return {"found": [job(rank, folder) for job in jobs]}


def in_turn(*jobs, ranks, folder):
    """By job, what each rank found; ranks take longer to start than a job."""
    answers = on_ranks(partial(_each, jobs), ranks, folder)
    return [[*found] for found in zip(*(answer["found"] for answer in answers), strict=True)]


def told(state):
    return {name: tensor.double().tolist() for name, tensor in state.items()}


def mean_of_whole_tables(rank, folder):
    torch.manual_seed(0)
    model = Tables()
    optimizer = torch.optim.SGD([model.one.weight, model.bag.weight], lr=0.01)
    for step in range(12):
        optimizer.zero_grad()
        model(*batch(rank, step)).backward()
        optimizer.step()
        with torch.no_grad():
            for weight in (model.one.weight, model.bag.weight):
                dist.all_reduce(weight)
                weight /= dist.get_world_size()
    return {"after": told(model.state_dict())}


def not_a_number(rank, folder):
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, WIDTH)
    sync = row_sync(table, every=1)
    table(torch.tensor([3 + rank, 50]))
    with torch.no_grad():
        table.weight[3 + rank, 5] = torch.nan if rank else 1.0
    sync.step()
    first = table.weight.isnan().any(dim=1).nonzero().flatten().tolist()
    sync.flush()
    return {"first": first, "after": table.weight.isnan().any(dim=1).nonzero().flatten().tolist()}


def lookups_that_train_nothing(rank, folder):
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, WIDTH)
    sync = row_sync(table, every=1)
    with torch.no_grad():
        table(torch.arange(50))
    sync.step()
    none = sync.traffic.rows
    for _ in range(2):
        table(torch.tensor([7, 7, 9]))
    sync.step()
    return {"none": none, "rows": sync.traffic.rows, "left": bool(next(iter(sync._tables.values())).seen.any())}


def refused(rank, folder):
    found = {}

    def tried(name, call):
        try:
            call()
            found[name] = "nothing was refused"
        except LokaError as error:
            found[name] = str(error)

    torch.manual_seed(0)
    table = nn.Embedding(8, 4)
    tried("late", lambda: row_sync(table, every=4, staleness=4))
    tried("no table", lambda: row_sync(nn.Linear(2, 2)))
    tried("codec", lambda: row_sync(table, codec="e5m2"))
    tried("float64", lambda: row_sync(nn.Embedding(8, 4).double()))
    tried("all rows", lambda: Trained(20, {"every": 4}, optimizer="Adam")(rank, folder))
    tried("sparse state", lambda: momentum_of_sparse_gradients())
    tried("state of all rows", lambda: Trained(20, {"every": 4}, optimizer="RMSprop")(rank, folder))
    adagrad = torch.optim.Adagrad(table.parameters(), initial_accumulator_value=1.0 + rank)
    tried("state", lambda: row_sync(table, optimizer=adagrad))
    torch.manual_seed(rank)
    tried("values", lambda: row_sync(nn.Embedding(8, 4)))
    tried("shapes", lambda: row_sync(nn.Embedding(8 + rank, 4)))
    torch.manual_seed(0)
    table = nn.Embedding(8, 4)
    tried("settings", lambda: row_sync(table, codec="int8" if rank else "e4m3"))
    tried("one cannot", lambda: row_sync(nn.Linear(2, 2) if rank else table))
    moved = {kind: {"optimizer": kind(table.parameters(), lr=0.1)} for kind in (torch.optim.Adagrad, RowwiseAdagrad)}
    tried("one group", lambda: row_sync(table, one_group=True, **moved[torch.optim.Adagrad]))
    half = nn.Embedding(8, 4).bfloat16()
    row_wise = RowwiseAdagrad(half.parameters())
    tried("one group of 16 bits", lambda: row_sync(half, one_group=True, optimizer=row_wise))
    tried("one group by nothing", lambda: row_sync(table, one_group=True))
    apart = row_sync(table, one_group=True, every=1, **moved[RowwiseAdagrad])
    moved[RowwiseAdagrad]["optimizer"].param_groups[0]["lr"] = 0.1 + rank
    tried("rates", apart.step)
    apart.remove()
    moved[RowwiseAdagrad]["optimizer"].param_groups[0]["weight_decay"] = float(rank)
    alone = row_sync(table, every=1, **moved[RowwiseAdagrad])
    alone._one_group = True
    tried("one rank decays", alone.step)
    tried("some states", lambda: states_of_some_tables(rank))
    tried("unfrozen", lambda: frozen_at_first())
    rarely = nn.Embedding(8, 4, max_norm=1.0)
    row_wise = RowwiseAdagrad(rarely.parameters())
    tried("max_norm", lambda: row_sync(rarely, one_group=True, optimizer=row_wise))
    sync = row_sync(table)
    sync._every = 2 + rank
    tried("steps", lambda: [sync.step() for _ in range(2 + rank)])
    return found


def momentum_of_sparse_gradients():
    table = nn.Embedding(8, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    sync = row_sync(table, optimizer=optimizer, every=1)
    for _ in range(2):
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
        sync.step()


@dataclass(frozen=True)
class Counted:
    """Bytes that collectives of `Trained` really take in from other ranks."""

    job: Trained

    def __call__(self, rank, folder):
        real, received = module.all_gather, [0]

        def counting(output, *args, **kwargs):
            received[0] += output.nbytes - output[0].nbytes
            return real(output, *args, **kwargs)

        module.all_gather = counting
        try:
            found = self.job(rank, folder)
        finally:
            module.all_gather = real
        return {**found, "received": received[0]}


def states_of_some_tables(rank):
    """SparseAdam makes state in a table's first step: as many on both replicas, and of other tables."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Embedding(8, 4, sparse=True) for _ in range(2))
    optimizer = torch.optim.SparseAdam(model.parameters())
    sync = row_sync(model, every=1, optimizer=optimizer)
    both = [table(torch.tensor([1, 2])) for table in model]
    both[rank].sum().backward()
    optimizer.step()
    sync.step()


def frozen_at_first():
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Embedding(8, 4) for _ in range(2))
    model[1].requires_grad_(False)
    sync = row_sync(model, every=1)
    model[1].requires_grad_(True)
    sync.step()


def as_one_group(rank, folder):
    """Rows of both ranks in one process, and by two replicas; the loss is a mean over a replica's rows. The rate
    rises, and has risen when replicas synchronize."""
    found = {}
    for name, of in (("one", (0, 1)), ("two", (rank,))):
        torch.manual_seed(0)
        model = Tables()
        optimizer = RowwiseAdagrad([model.one.weight, model.bag.weight], lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 12)
        sync = row_sync(model, every=1, codec="fp32", optimizer=optimizer, one_group=True) if name == "two" else None
        for step in range(12):
            optimizer.zero_grad()
            for part in of:
                (model(*batch(part, step)) / len(of)).backward()
            optimizer.step()
            schedule.step()
            if sync:
                sync.step()
        if sync:
            sync.flush()
        found[name] = told(model.state_dict()) | {
            f"V{place}": state["sum"].tolist() for place, state in enumerate(optimizer.state.values())
        }
    return found
