"""A `Stats` as one string of bytes, to send to another rank: JSON, then safetensors. Nothing is pickled."""

import json

from loka.core.records.stats import Stats, flatten, unflatten
from loka.core.storage.files import tensors_from_bytes, tensors_to_bytes

_LENGTH = 8  # bytes that tell the length of the JSON


def to_bytes(stats: Stats) -> bytes:
    content, tensors = flatten(stats)
    head = json.dumps(content, allow_nan=False).encode()  # in order: that of the layers
    return len(head).to_bytes(_LENGTH, "little") + head + tensors_to_bytes(tensors)


def from_bytes(data: bytes) -> Stats:
    """What `to_bytes` made; its tensors lie on the CPU."""
    length = int.from_bytes(data[:_LENGTH], "little")
    head, rest = data[_LENGTH : _LENGTH + length], data[_LENGTH + length :]
    return unflatten(json.loads(head), tensors_from_bytes(rest))
