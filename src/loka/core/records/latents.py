"""Latents that a frozen model computed ahead, read by id: one byte a value, a float32 scale a row.

    latent [N, d] ~ low [N, d] e4m3 * scale [N, 1]      |error| <= max(2^-4 |latent|, 2^-10 scale)

A large model answers before requests come, and small ones read what it left: SOLARIS (arXiv 2604.12110)
precomputes embeddings of user-item pairs so. Which ids, and when, is the caller's; so is the clock, an int64
that rises. Latents of two models, or of one trained twice, lie in different spaces: a store is of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from loka.core.exceptions import FileRefused, ServeRefused
from loka.core.numerics.reference import Quantized, dequantize, quantize
from loka.core.recipe import Cast, Format, Granularity
from loka.core.storage.files import read_tensors, sha256_of_file, write_tensors
from loka.core.storage.record_file import RecordFile

CAST = Cast(Format.E4M3, Granularity.ROW)
_CARD, _TENSORS = "latents.json", "latents.safetensors"
_AGAIN = "let the teacher write them again"

_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, kw_only=True)
class LatentsCard(RecordFile, kind="loka-latents", version=1, way_out=f"name a folder that `save` wrote, or {_AGAIN}"):
    """What `latents.json` holds: whose latents, and the sha256 of the file beside it."""

    teacher: str
    sha256: str


@dataclass(frozen=True)
class Found:
    """What a store holds of ids [B]: `values` [B, d] float32, zeros but for hits; bool `hit`, and `stale`,
    which is stored and too old; int64 `age` and `version`, -1 of what is not stored."""

    values: torch.Tensor
    hit: torch.Tensor
    stale: torch.Tensor
    age: torch.Tensor
    version: torch.Tensor

    @property
    def hit_rate(self) -> float:
        """nan for no ids."""
        return float(self.hit.double().mean())


@dataclass(frozen=True, kw_only=True)
class Latents:
    """Of each of `ids` [N], which rise: `low` e4m3 [N, d] with `scale` [N, 1], the `version` of the teacher
    that wrote it, and when it was `written`, int64 [N]. Made by `of` and `load`."""

    teacher: str
    ids: torch.Tensor
    low: torch.Tensor
    scale: torch.Tensor
    version: torch.Tensor
    written: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor, latents: torch.Tensor, *, teacher: str, version: int, written: int) -> Latents:
        """Of `latents` [N, d], any float dtype, of `ids` [N] int64; of an id that stands twice, the last row.

        `teacher` names the weights that made the space, such as a hash of the first ones, `version` is
        `Server.version`, `written` now by the caller's clock.

        Raises ServeRefused where ids and latents do not belong together, a latent is not finite, or a number is
        no int64.
        """
        if ids.dtype != torch.int64 or latents.dim() != 2 or ids.shape != latents.shape[:1]:
            raise ServeRefused(
                f"ids {ids.dtype} {list(ids.shape)} and latents {list(latents.shape)} do not belong together",
                way_out="give int64 [N] and [N, d]",
            )
        if not all(isinstance(number, int) and number in _INT64 for number in (version, written)):
            raise ServeRefused(f"version {version} or written {written} is no int64", way_out="count from another zero")
        latents = latents.detach().float()
        bad = int((~latents.isfinite()).any(dim=1).sum())
        if bad:
            raise ServeRefused(
                f"{bad} of {len(ids)} latents hold NaN or infinity",
                way_out="look at the teacher's rows (`Answer.nonfinite_rows`), and store the others",
            )
        quantized = quantize(latents, CAST)
        when = {"version": torch.full_like(ids, version), "written": torch.full_like(ids, written)}
        made = cls(teacher=teacher, ids=ids, low=quantized.data, scale=quantized.scale, **when)
        return made._newest()  # of no rows quantize makes one scale, which goes here

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def merged(self, other: Latents) -> Latents:
        """Both; of an id in both what was written later, or `other`'s. Refuses another teacher's."""
        if (self.teacher, self.low.shape[1]) != (other.teacher, other.low.shape[1]):
            raise ServeRefused(
                "latents of two teachers lie in different spaces",
                why=[f"{one.teacher!r}, {one.low.shape[1]} wide" for one in (self, other)],
                way_out="keep a store for each",
            )
        theirs = other._tensors()
        both = {name: torch.cat([mine, theirs[name]]) for name, mine in self._tensors().items()}
        return Latents(teacher=self.teacher, **both)._newest()

    def look_up(self, ids: torch.Tensor, *, now: int, max_age: int | None = None) -> Found:
        """Of `ids` [B] int64; older than `max_age` is no hit. Refuses other ids, a clock that went back, and a time or
        an age that is no int64."""
        first, last = self._written_between if len(self) else (now, now)
        if not all(isinstance(number, int) and number in _INT64 for number in (now, now - first)):
            raise ServeRefused(
                f"the time {now} or the age {now - first} is no int64", way_out="count from another zero"
            )
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise ServeRefused(f"ids are {ids.dtype} {list(ids.shape)}", way_out="give int64 [B]: ids.long()")
        if (ahead := last - now) > 0:
            raise ServeRefused(
                f"the clock shows {now}, and latents were written {ahead} later",
                way_out="read the store by the clock that it was written by",
            )
        place = torch.searchsorted(self.ids, ids).clamp(max=max(len(self) - 1, 0))
        stored = self.ids[place] == ids if len(self) else torch.zeros_like(ids, dtype=torch.bool)
        place = place[stored]
        age, version = torch.full_like(ids, -1), torch.full_like(ids, -1)
        age[stored], version[stored] = now - self.written[place], self.version[place]
        fresh = stored if max_age is None else stored & (age <= max_age)
        values = self.scale.new_zeros(len(ids), self.low.shape[1])
        kept = place[fresh[stored]]
        values[fresh] = dequantize(Quantized(self.low[kept], self.scale[kept], CAST))
        return Found(values=values, hit=fresh, stale=stored & ~fresh, age=age, version=version)

    def save(self, folder: Path | str) -> None:
        """Raises NotWritten where the disk refuses; the folder then has no card, and is no store."""
        folder = Path(folder)
        (folder / _CARD).unlink(missing_ok=True)
        write_tensors(folder / _TENSORS, self._tensors())
        card = LatentsCard(teacher=self.teacher, sha256=sha256_of_file(folder / _TENSORS))
        card.save(folder / _CARD)

    @classmethod
    def load(cls, folder: Path | str, *, teacher: str) -> Latents:
        """Raises FileRefused for a store that is damaged, or of another teacher."""
        folder = Path(folder)
        card = LatentsCard.load(folder / _CARD)
        if card.teacher != teacher:
            raise FileRefused(
                f"{folder} holds latents of another teacher",
                why=[f"stored  {card.teacher}", f"wanted  {teacher}"],
                way_out=_AGAIN,
            )
        return cls(teacher=teacher, **read_tensors(folder / _TENSORS, sha256=card.sha256, way_out=_AGAIN))

    @cached_property
    def _written_between(self) -> tuple[int, int]:
        """The first and the last time: a look-up of a few ids does not go over all of a store for them."""
        return int(self.written.min()), int(self.written.max())

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in ("ids", "low", "scale", "version", "written")}

    def _newest(self) -> Latents:
        """Ids in order, and of each the row that was written last, or stands last."""
        order = self.written.argsort(stable=True)
        order = order[self.ids[order].argsort(stable=True)]
        last = torch.ones_like(order, dtype=torch.bool)
        last[:-1] = self.ids[order[1:]] != self.ids[order[:-1]]
        kept = {name: tensor[order[last]] for name, tensor in self._tensors().items()}
        return Latents(teacher=self.teacher, **kept)
