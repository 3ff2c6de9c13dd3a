"""Ways to damage a record: its bytes, its text, its content under a checksum that fits, and the file itself.

Each takes a seeded `random.Random`, so that a case can be made again by its number.
"""

import copy
import gzip
import hashlib
import json
import os
import re
import shutil
import socket
from pathlib import Path

from loka.core.storage.files import canonical


def truncated(draw, data):
    return data[: draw.randrange(len(data))]


def flipped(draw, data):
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def inserted(draw, data):
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.choice((b"\0", b"\xff\xfe", draw.randbytes(9), b"\n", b'"', b"}")) + data[at:]


def cut_out(draw, data):
    first, last = sorted(draw.randrange(len(data)) for _ in range(2))
    return data[:first] + data[last:]


def repeated(draw, data):
    first, last = sorted(draw.randrange(len(data)) for _ in range(2))
    return data[:last] + data[first:]


def overwritten(draw, data):
    at = draw.randrange(len(data))
    return data[:at] + draw.randbytes(min(512, len(data) - at)) + data[at + 512 :]


def in_other_letters(draw, data):
    """As UTF-16 or UTF-32, with a mark of byte order, or in Latin 1 with letters that are no UTF-8."""
    text = data.decode()
    return draw.choice(
        (
            text.encode("utf-16"),
            text.encode("utf-32"),
            b"\xef\xbb\xbf" + data,
            text.replace('": "', '": "\xe9', 1).encode("latin-1", errors="replace"),
        )
    )


NUMBERS = ("1e999", "-1e999", "NaN", "Infinity", "9" * 400, "-" + "9" * 5000, "1e-999", "0x10", "1_0", "٣")
RAW_VALUES = ("[" * 2000 + "]" * 2000, '{"a":' * 900 + "1" + "}" * 900, "[" * 100_000, '"' + "a" * 70_000_000)


def another_number(draw, data):
    """One that JSON or a record does not have, in the place of one that it has."""
    text = data.decode()
    found = list(re.finditer(r"(?<=[\s\[,:])-?\d+(\.\d+)?(e-?\d+)?(?=[,\s\]}])", text))
    if not found:
        return data[:-2]
    chosen = draw.choice(found)
    return (text[: chosen.start()] + draw.choice(NUMBERS) + text[chosen.end() :]).encode()


def deep_or_long(draw, data):
    text = data.decode()
    return text.replace('"content": {', '"content": {"deep": ' + draw.choice(RAW_VALUES) + ",", 1).encode()


def key_twice(draw, data):
    """JSON has no rule for which of two values under one name counts."""
    text = data.decode()
    found = list(re.finditer(r'"[^"\\]+": (?="?[\w-])', text))
    chosen = draw.choice(found)
    value = draw.choice(("null", "1", '"x"', "[]", "{}"))
    return (text[: chosen.start()] + chosen[0] + value + ", " + text[chosen.start() :]).encode()


def header_changed(draw, data):
    record = json.loads(data)
    field = draw.choice(("kind", "version", "sha256", "content"))
    values = (None, True, 0, -1, 3, 1.0, 2.0, "1", "", "loka-plan", [], {}, "0" * 64, 10**19)
    record[field] = draw.choice([value for value in values if not _same(value, record[field])])
    if draw.random() < 0.2:
        del record[field]
    return json.dumps(record).encode() + b"\n"


BYTES = (
    truncated,
    flipped,
    inserted,
    cut_out,
    repeated,
    overwritten,
    in_other_letters,
    another_number,
    another_number,
    deep_or_long,
    key_twice,
    header_changed,
)

VALUES = (
    None, True, 0, -1, 3, 1.5, -0.5, 1e308, 2**63, 10**19, "", "x", "1", "nan", "\x1b[2J", "../../etc/passwd",
    "\0", "\ud800", "x" * 100_000, [], {}, [1, 2], {"a": 1}, [[]], [None], {"": None},
)  # fmt: skip


def another_value(draw, content):
    holder, key = draw.choice(list(_places(content)))
    values = [value for value in VALUES if not _same(value, holder[key])]
    holder[key] = copy.deepcopy(draw.choice(values))
    return content


def left_out(draw, content):
    holder, key = draw.choice(list(_places(content)))
    del holder[key]
    return content


def added(draw, content):
    holders = [content, *(holder[key] for holder, key in _places(content))]
    holder = draw.choice([holder for holder in holders if isinstance(holder, dict | list)])
    value = copy.deepcopy(draw.choice(VALUES))
    if isinstance(holder, list):
        holder.insert(draw.randrange(len(holder) + 1), value)
    else:
        holder[draw.choice(("strange", "", "__class__", "self", "\x1b"))] = value
    return content


def exchanged(draw, content):
    (one, first), (other, second) = (draw.choice(list(_places(content))) for _ in range(2))
    values = copy.deepcopy(one[first]), copy.deepcopy(other[second])
    one[first] = values[1]
    if _reaches(content, other, second):
        other[second] = values[0]
    return content


def nested(draw, content):
    holder, key = draw.choice(list(_places(content)))
    value = 1
    for _ in range(draw.choice((50, 500))):
        value = [value] if draw.random() < 0.5 else {"a": value}
    holder[key] = value
    return content


CONTENTS = (another_value, another_value, another_value, left_out, added, exchanged, nested)


def with_checksum(record, content):
    """A record of that content as LoKA would have written it; None where it cannot be written."""
    try:
        digest = hashlib.sha256(canonical(content)).hexdigest()
        return json.dumps({**record, "content": content, "sha256": digest}).encode()
    except (ValueError, RecursionError, UnicodeEncodeError):
        return None


def _pipe(path):
    os.mkfifo(path)


def _device(path):
    path.symlink_to("/dev/zero")


def _loop(path):
    path.symlink_to(path.name)


def _folder(path):
    path.mkdir()


def _sparse(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        here = Path.cwd()
        os.chdir(path.parent)  # such names are short
        try:
            one.bind(path.name)
        finally:
            os.chdir(here)


def _nothing(path):
    pass


PLACES = (_pipe, _device, _loop, _folder, _sparse, _socket, _nothing)


def put(path, place):
    """Something else than a file in the place of `path`."""
    remove(path)
    place(path)


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def bomb(draw, data):
    """Compressed: much in little, junk after a whole record, or half of one."""
    kind = draw.choice(("zeros", "spaces", "after", "half", "twice", "junk"))
    packed = gzip.compress(data, compresslevel=1)
    return {
        "zeros": lambda: gzip.compress(bytes(1 << 20), compresslevel=9) * 256,
        "spaces": lambda: gzip.compress(b" " * (1 << 20)) * 70 + packed,
        "after": lambda: packed + draw.randbytes(100),
        "half": lambda: packed[: len(packed) // 2],
        "twice": lambda: packed * 2,
        "junk": lambda: b"\x1f\x8b\x08" + draw.randbytes(300),
    }[kind]()


def _places(content):
    """Each holder and key in it; some of the entries of long lists."""
    entries = ()
    if isinstance(content, dict):
        entries = list(content.items())
    elif isinstance(content, list):
        entries = list(enumerate(content))[:6]
    for key, value in entries:
        yield content, key
        yield from _places(value)


def _reaches(content, holder, key):
    return any(found is holder and at == key for found, at in _places(content))


def _same(one, other):
    return type(one) is type(other) and one == other
