"""How a view of a parameter is written: `kernels[0]`, `in_proj_weight[:64]`, `w.chunk(2)[1]`.

A site is named by its parameter and the view that it multiplies by. Transposes are part of how a GEMM reads
the weight and not of which numbers it reads, so names leave them out (`name_of`); copies and casts say
nothing. A view that cannot be written, by a mask say, makes a new tensor that is no parameter's.
"""

import operator
from typing import Any

import torch

_T = torch.Tensor
_TRANSPOSES = {_T.t, torch.t, _T.transpose, torch.transpose, _T.swapaxes, torch.swapaxes, _T.permute, torch.permute}
_TRANSPOSES |= {_T.T.__get__, _T.mT.__get__, _T.swapdims, torch.swapdims, _T.movedim, torch.movedim}  # type: ignore[attr-defined]
_COPIES = {_T.contiguous, _T.clone, torch.clone, _T.to, _T.type, _T.float, _T.half, _T.bfloat16, _T.double}
_COPIES |= {_T.type_as, _T.requires_grad_, _T.data.__get__, _T.detach, torch.detach, _T.cuda, _T.cpu}  # type: ignore[attr-defined]
_SHAPES = {_T.view, _T.reshape, torch.reshape, _T.flatten, torch.flatten, _T.squeeze, torch.squeeze}
_SHAPES |= {_T.unsqueeze, torch.unsqueeze, _T.narrow, torch.narrow, _T.select, torch.select}
_PARTS = {_T.chunk, torch.chunk, _T.split, torch.split, _T.unbind, torch.unbind, _T.tensor_split}
_PARTS |= {torch.tensor_split, _T.split_with_sizes, torch.split_with_sizes}
_ITEMS = {_T.__getitem__, operator.getitem}  # the second is what torch.export traces
VIEWS = frozenset(_TRANSPOSES | _COPIES | _SHAPES | _PARTS | _ITEMS)

_MARK = "~"  # marks a transpose in a key
TRANSPOSED = "~.t()~"  # of .t(), .T and .mT


def view_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What the view adds to the key of args[0]; None where it cannot be written. Parts add their index."""
    if func in _COPIES:
        return ""
    given = args[1:]
    if func in _ITEMS:
        index = _index(given[0])
        return None if index is None else f"[{index}]"
    told = [_plain(value) for value in given]
    for name in sorted(kwargs):
        if func not in _PARTS or (name, kwargs[name]) != ("dim", 0):
            told.append(f"{name}={_plain(kwargs[name])}")
    if any("?" in part for part in told):
        return None
    text = f".{_NAMES[func]}({', '.join(told)})"
    return _MARK + text + _MARK if func in _TRANSPOSES else text


_NAMES = {func: getattr(func, "__name__", "view") for func in VIEWS}
_NAMES[_T.T.__get__] = _NAMES[_T.mT.__get__] = "t"  # type: ignore[attr-defined]


def name_of(key: str) -> str:
    """The key without its transposes."""
    return "".join(key.split(_MARK)[::2])


def _index(index: Any) -> str | None:
    if isinstance(index, tuple):
        parts = [_index(part) for part in index]
        return None if None in parts else ", ".join(str(part) for part in parts)
    if isinstance(index, slice):
        start = "" if index.start is None else str(index.start)
        stop = "" if index.stop is None else str(index.stop)
        return f"{start}:{stop}" if index.step is None else f"{start}:{stop}:{index.step}"
    if index is None or index is Ellipsis:
        return "None" if index is None else "..."
    return str(index) if isinstance(index, int) and not isinstance(index, bool) else None


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_plain(one) for one in value) + "]"
    return str(value) if value is None or isinstance(value, (int, float, str)) else "?"
