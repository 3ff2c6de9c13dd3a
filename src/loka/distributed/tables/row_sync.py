"""Tables that replicas train on rows of their own, brought together by what changed.

In two-dimensional sparse parallelism (TorchRec's DMPCollection) groups of ranks hold the same tables, and the
means over groups are taken now and then, of whole tables. Between two of them a replica changes few rows:

    before     each replica has w0, the rows that all agreed upon; it saves a row when it first looks it up
    send       x_r = w_r - w0 + e_r for the rows it changed, as codes q_r, a scale a row; x_r - q_r is e_r
    agree      w0 = w0 + sum_r q_r / R, or what one group would have made (`one_group`), added in the order of
               replicas: the same bits on all
    late       what a replica did since it sent is added on top: w_r = w0 + (w_r - w_r then)

Never weights in eight bits: a delta's rounding error is a part of one step's change, and e_r brings it later
(error feedback); a weight's is a part of the weight. State of optimizers is sent in float32.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from loka.core.exceptions import LokaError
from loka.core.exchange import ranks_of, same_on_all
from loka.distributed.gradient_codec import Codec, all_gather, codec_named
from loka.distributed.tables.changed_rows import Rule, Sent, Table, agree_on_rows, mean_of_replicas
from loka.distributed.tables.left_over import LeftOver
from loka.distributed.tables.lookups import Lookup, differences, frozen_tables, lookups_of
from loka.distributed.tables.one_group import AdaGrad, as_one_group
from loka.distributed.tables.row_codes import byte_counts, codec_of, decode_rows, encode_rows


@dataclass(kw_only=True)
class Traffic:
    """What this replica received, in bytes, and what an all-reduce of the tables would have sent it.

    Attributes:
        syncs: exchanges so far.
        rows: that this replica sent.
        received: bytes from the other replicas, each padded to the longest.
        whole: bytes that a ring's all-reduce of weights and states receives: 2 (R - 1) / R of them, a sync.
    """

    syncs: int = 0
    rows: int = 0
    received: int = 0
    whole: int = 0


@dataclass(frozen=True, kw_only=True)
class _Flight:
    """An exchange under way, of what `steps` training steps did.

    Attributes:
        adagrads: row-wise AdaGrad of each table, where they become as one group's; else none.
    """

    sent: list[Sent]
    rows: list[list[int]]
    exact: bool
    bytes: torch.Tensor
    work: dist.Work | None
    begun: int
    steps: int
    adagrads: list[AdaGrad]


class RowSync:
    """Made by `row_sync`. Call `step` after each training step, `flush` before tables are read or saved."""

    def __init__(
        self,
        lookups: Sequence[Lookup],
        frozen: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup | None,
        *,
        every: int,
        exact_every: int,
        staleness: int,
        codec: str,
        one_group: bool,
    ) -> None:
        self.traffic = Traffic()
        self._group, self._codec_name, self._one_group, self._frozen = group, codec, one_group, frozen
        self._every, self._exact_every, self._staleness = every, exact_every, staleness
        self._steps = self._begun = 0
        self._flight: _Flight | None = None
        self._tables: dict[str, Table] = {}
        self._hooks: list[RemovableHandle] = []
        shared: dict[int, Table] = {}
        for lookup in lookups:
            weight = lookup.tensors()[0]
            table = shared.setdefault(
                weight.data_ptr() or id(weight),
                Table(
                    lookup=lookup,
                    seen=torch.zeros(len(weight), dtype=torch.bool, device=weight.device),
                    left=LeftOver(weight),
                ),
            )
            if table.lookup is lookup:
                self._tables[lookup.name] = table
            self._hooks.append(_before_forward(lookup, table))

    def step(self) -> None:
        """After a training step of this replica. A collective in every `every`-th call.

        Raises:
            LokaError: replicas call it at different steps; rows changed that nothing looked up, which the
                second exchange and all exact ones check.
        """
        self._steps += 1
        if self._flight is not None and self._steps - self._flight.begun >= self._staleness:
            self._finish()
        if self._steps % self._every == 0:
            self._finish()
            exact = (self._steps // self._every) % self._exact_every == 0
            self._begin(exact=exact)
            if exact or self._staleness == 0 or self.traffic.syncs == 2:
                self._finish()
            if exact or self.traffic.syncs == 2:
                self._check()

    def flush(self) -> None:
        """Brings all replicas to the same tables, bit for bit, with nothing left over. A collective.

        Raises:
            LokaError: as `step`.
        """
        self._finish()
        self._begin(exact=True)
        self._finish()
        self._check()

    def _check(self) -> None:
        differing = differences([table.lookup for table in self._tables.values()], self._group)
        if differing:
            raise LokaError(
                "tables of replicas differ after an exchange: rows changed that nothing had looked up",
                why=differing,
                way_out="an optimizer that moves only rows with a gradient (RowWiseAdagrad, SparseAdam) and "
                "decays no weights; write to tables before a new row_sync alone; run a compiled model after it is made "
                "and not before; or DMPCollection.sync",
            )

    def remove(self) -> None:
        """Looks at no further lookups; tables stay as they are. `flush` first, or replicas differ."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begin(self, *, exact: bool) -> None:
        """Sends what this replica's rows changed by, and receives from the others: `_finish` waits for it."""
        tables = [*self._tables.values()]
        own: list[tuple[Sent, list[torch.Tensor]]] = []
        adagrads: list[AdaGrad] = []
        failed: LokaError | None = None
        try:
            adagrads = self._ready()
            own = [self._taken(table, exact=exact) for table in tables]
        except LokaError as error:  # told to all, which would wait for this replica
            failed = error
        settings = [self._steps, int(exact), zlib.crc32(repr(adagrads).encode())]
        states = [0] * len(tables) if failed else [len(parts) - 2 for _, parts in own]
        rows = [0] * len(tables) if failed else [len(taken.ids) for taken, _ in own]
        all_rows = self._agreed_rows([*settings, *states], rows, failed)
        device, ranks = tables[0].seen.device, len(all_rows)
        mine = torch.cat(
            [*(part for _, parts in own for part in parts), torch.empty(0, dtype=torch.uint8, device=device)]
        )
        codecs = [self._codec(table, exact=exact) for table in tables]
        longest = max(
            sum(sum(byte_counts(*each)) for each in zip(tables, other, codecs, strict=True)) for other in all_rows
        )
        came = torch.zeros(ranks, longest, dtype=torch.uint8, device=device)
        padded = torch.cat([mine, came[0, : longest - len(mine)]])
        work = all_gather(came, padded[None], group=self._group, async_op=True) if longest else None
        self._flight = _Flight(
            sent=[taken for taken, _ in own],
            rows=all_rows,
            exact=exact,
            bytes=came,
            work=work,
            begun=self._steps,
            steps=max(self._steps - self._begun, 1),
            adagrads=adagrads,
        )
        self._begun = self._steps
        self.traffic.syncs += 1
        self.traffic.rows += sum(rows)
        counts = 8 * (1 + len(settings) + len(states) + len(rows))
        self.traffic.received += (ranks - 1) * (longest + counts)
        held = sum(tensor.nbytes for table in tables for tensor in table.lookup.tensors())
        self.traffic.whole += 2 * (ranks - 1) * held // ranks

    def _taken(self, table: Table, *, exact: bool) -> tuple[Sent, list[torch.Tensor]]:
        """The rows of a table to send, and their bytes."""
        taken = table.take(table.left.ids if exact else table.left.ids[:0])
        return taken, encode_rows(table, taken, self._codec(table, exact=exact), exact=exact)

    def _agreed_rows(self, alike: list[int], rows: list[int], failed: LokaError | None) -> list[list[int]]:
        """For each replica how many rows of each table it sends. A collective.

        `alike`: the step, whether it is exact, the rates, and each table's number of states, the same on all replicas.

        Raises LokaError on all replicas where one has `failed`, or where they are not alike.
        """
        counts = [int(failed is not None), *alike, *rows]
        device, ranks = next(iter(self._tables.values())).seen.device, ranks_of(self._group)
        told = torch.empty(ranks, len(counts), dtype=torch.int64, device=device)
        all_gather(told, torch.tensor([counts], device=device), group=self._group)
        all_counts, head = told.tolist(), 1 + len(alike)
        if unable := [r for r, (unable, *_) in enumerate(all_counts) if unable]:
            raise failed or LokaError(
                "a replica cannot synchronize its tables",
                why=[f"replica {r} says why in its own log" for r in unable],
                way_out="mend it there",
            )
        if any(other[:head] != counts[:head] for other in all_counts):
            raise LokaError(
                "replicas do not synchronize the same",
                why=[
                    f"replica {r}: step {step}, {'exact' if exact else 'coded'}, rates {rates:08x}, states of "
                    + ", ".join(f"{name} {held}" for name, held in zip(self._tables, of_each, strict=False))
                    for r, (_, step, exact, rates, *of_each) in enumerate(all_counts)
                ],
                way_out="call step() as often on every replica, with the same settings and rates, once the "
                "optimizers of all have stepped; give a table its state everywhere before the first exchange",
            )
        return [other[head:] for other in all_counts]

    def _ready(self) -> list[AdaGrad]:
        """Of each table, where they become as one group's. Raises LokaError where an exchange would be wrong."""
        if trained := [name for name, weight in self._frozen.items() if weight.requires_grad]:
            raise LokaError(
                "tables are trained that were frozen when row_sync was made",
                why=trained,
                way_out="flush() and remove() it, give all replicas the same tables, and make another",
            )
        return _adagrads([table.lookup for table in self._tables.values()]) if self._one_group else []

    def _finish(self) -> None:
        """Waits for what was sent, and brings each table to what all agree upon."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        if flight.work is not None:
            flight.work.wait()
        ranks = len(flight.rows)
        at = [0] * ranks
        for index, (table, own) in enumerate(zip(self._tables.values(), flight.sent, strict=True)):
            counts = [rows[index] for rows in flight.rows]
            codec = self._codec(table, exact=flight.exact)
            came: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
            for r, count in enumerate(counts):
                sizes = byte_counts(table, count, codec)
                sent = flight.bytes[r, at[r] : at[r] + sum(sizes)].split(sizes)
                at[r] += sum(sizes)
                came.append(decode_rows(table, sent, count, codec))
            rule: Rule = mean_of_replicas
            if flight.adagrads and len(table.lookup.tensors()) > 1:  # momentum: something has moved the table
                rule = partial(as_one_group, adagrad=flight.adagrads[index], steps=flight.steps)
            agree_on_rows(table, own, came, rule)

    def _codec(self, table: Table, *, exact: bool) -> Codec:
        return codec_of(table, self._codec_name, exact=exact)


def row_sync(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    every: int = 16,
    exact_every: int = 64,
    staleness: int = 0,
    codec: str = "e4m3",
    optimizer: torch.optim.Optimizer | None = None,
    one_group: bool = False,
) -> RowSync:
    """Keeps the tables of replicas together by the rows that they changed, in eight bits with error feedback.

    Replicas are the ranks of `group`, each with all of `model`'s tables, or with the same shards of them, and
    rows of its own; in TorchRec's DMPCollection the replica group, where this stands for `sync`. They agree
    upon the mean of what each made of a row, of those that left it included, or upon what one group of all their
    ranks would have made of it. Weights that are no tables are not looked at. Call it on every replica when the
    model is on its device, with equal tables.

    Args:
        every: training steps from one exchange to the next.
        exact_every: exchanges from one in float32 to the next, which leaves no rounding error anywhere.
            Between them a row's error is held, in float32.
        staleness: training steps that an exchange may take, while training goes on: fewer than `every`. The
            second exchange and those in float32 are waited for, and checked.
        codec: of what weights changed by: e4m3, int8, bf16, fp32. A scale a row.
        optimizer: of tables that are plain parameters: its state is exchanged too, in float32, as that of
            table-batched embeddings always is.
        one_group: rows of float32 become what one group's row-wise AdaGrad makes of the same batches, where the
            loss is a mean over a replica's own rows of data: exactly so for `every=1` and codec fp32 where a
            step updates each table once, at a rate above 0, else as far as `one_group` says. Rates stay those of
            one group; with `every` above 1 call `step` before the scheduler's, as its rate is taken for the window's.

    Raises:
        LokaError: no table was found; one cannot be synchronized; replicas differ in their tables; `one_group`,
            and something else than row-wise AdaGrad moves a table, or it has 16 bits.
        PlanMismatch: replicas differ in their settings, or one cannot.
        UnknownName: `codec`.
    """
    mine: str | LokaError = (
        f"{every=}, {exact_every=}, {staleness=}, {codec=}, optimizer={type(optimizer).__name__}, {one_group=}"
    )
    try:
        codec_named(codec)
        if every < 1 or exact_every < 1 or not 0 <= staleness < every:
            raise LokaError(
                f"{every=}, {exact_every=} and {staleness=} do not fit together",
                why=["an exchange has to end before the next one begins"],
                way_out="every >= 1, exact_every >= 1, 0 <= staleness < every",
            )
        lookups = lookups_of(model, optimizer)
        if not lookups:
            raise LokaError(
                "the model has no table to synchronize",
                why=["neither nn.Embedding, nn.EmbeddingBag nor table-batched embeddings that are trained"],
                way_out="pass the model whose tables are replicated",
            )
        if one_group:
            _adagrads(lookups)
        devices = {one.tensors()[0].device for one in lookups}
        if len(devices) > 1 or not dist.is_initialized():
            raise LokaError(
                "tables cannot be exchanged",
                why=[f"they lie on {', '.join(sorted(map(str, devices)))}" if len(devices) > 1 else "no process group"],
                way_out="torchrun, and init_process_group; a model on one device a replica",
            )
    except LokaError as error:
        mine = error
    same_on_all(mine, group, what="replicas have different settings", way_out="the same arguments on every replica")
    differing = differences(lookups, group)
    if differing:
        raise LokaError(
            "replicas have different tables",
            why=differing,
            way_out="give all the same weights first: the same seed, a checkpoint, or a broadcast from one",
        )
    settings = {"every": every, "exact_every": exact_every, "staleness": staleness}
    return RowSync(lookups, frozen_tables(model), group, codec=codec, one_group=one_group, **settings)


def _adagrads(lookups: Sequence[Lookup]) -> list[AdaGrad]:
    """Of each table. Raises LokaError where one group's momentum cannot be told."""
    told = [one.adagrad() for one in lookups]
    others = [f"{one.name}: {by} moves it" for one, by in zip(lookups, told, strict=True) if isinstance(by, str)]
    others += [f"{one.name} holds {x.dtype}" for one in lookups if (x := one.tensors()[0]).dtype != torch.float32]
    if others:
        raise LokaError(
            "what one group would have made of these tables cannot be told",
            why=others,
            way_out="row-wise AdaGrad without decay on tables in float32 (fbgemm's EXACT_ROWWISE_ADAGRAD, or "
            "optimizer=loka.train.RowwiseAdagrad(...)), or one_group=False: the mean of what replicas made",
        )
    return [one for one in told if isinstance(one, AdaGrad)]


def _before_forward(lookup: Lookup, table: Table) -> RemovableHandle:
    @torch.compiler.disable  # it keeps tensors in lists: Dynamo would trace that, and bake them in
    def look(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                table.note(lookup.ids((args, kwargs)))

    return lookup.module.register_forward_pre_hook(look, with_kwargs=True)
