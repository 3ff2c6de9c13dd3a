"""Which changes of a model's code its digest sees (serve/model/code.py)."""

import copy
import enum
import functools
import logging
import operator
import threading
import types
from collections import deque
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from loka.serve.model import code
from loka.serve.model.code import data_of, digest_of_code

SOURCE = """
import functools
import torch
from torch import nn
LIMIT = 3.0
def helper(x):
    return bound(x) if x.dim() in {1, 2} else x
def bound(x):
    return x.clamp(max=LIMIT)
@functools.lru_cache
def places(n):
    return n + 1
def decorated(f):
    @functools.wraps(f)
    def inner(*a):
        return f(*a)
    return inner
class Base(nn.Module):
    factor = 2.0
    @property
    def shift(self):
        return 1.0
    @classmethod
    def made(cls):
        return 7
class Model(Base):
    def __init__(self):
        super().__init__()
        self.layer, self.act, self.rate = nn.Linear(4, 4), lambda x: x * 5.0, 0.5
    @decorated
    def forward(self, x, scale=9.0):
        y = [each * 11.0 for each in (helper(self.layer(x)),)]
        return self.act(y[0]) * self.factor + self.shift + places(2) + self.made()
"""


def model_of(source):
    scope = {"__name__": "mine"}
    exec(compile(source, "mine.py", "exec"), scope)
    torch.manual_seed(len(source))
    return scope["Model"]()


def test_it_is_that_of_the_code():
    one, other = model_of(SOURCE), model_of("# a comment\n" + SOURCE)
    assert digest_of_code(one) == digest_of_code(other)
    other.train(mode=False)
    one.eval()
    one(torch.ones(2, 4))
    assert digest_of_code(one) == digest_of_code(other)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("LIMIT = 3.0", "LIMIT = 4.0"),
        ("max=LIMIT", "min=LIMIT"),
        ("return n + 1", "return n + 2"),
        ("return f(*a)", "return -f(*a)"),
        ("factor = 2.0", "factor = 3.0"),
        ("return 1.0", "return 2.0"),
        ("return 7", "return 8"),
        ("x * 5.0", "x * 6.0"),
        ("0.5", "0.25"),
        ("scale=9.0", "scale=8.0"),
        ("each * 11.0", "each * 12.0"),
        ("{1, 2}", "{1, 3}"),
        ("nn.Linear(4, 4)", "nn.Identity()"),
    ],
)
def test_changes_that_it_sees(before, after):
    assert before in SOURCE
    assert digest_of_code(model_of(SOURCE.replace(before, after))) != digest_of_code(model_of(SOURCE))


def test_a_function_that_calls_itself_and_a_closure_without_a_value():
    def count(x):
        return count(x) if later else x

    module = nn.Identity()
    module.act, module.part = count, functools.partial(count)
    first = digest_of_code(module)
    later = True
    assert digest_of_code(module) != first


def test_deep_chains_of_calls_and_modules_end():
    """Also of libraries: only names that code gives are looked up, and nothing is imported for it."""
    scope = {"__name__": "mine"}
    exec("\n".join(f"def f{place}(x): return f{place + 1}(x)" for place in range(2000)), scope)
    module = nn.Identity()
    module.act = scope["f0"]
    first = digest_of_code(module)
    exec("def f3(x): return -f4(x)", scope)
    assert digest_of_code(module) != first


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Slotted:
    __slots__ = ("bound",)

    def __init__(self, bound):
        self.bound = bound


class Holding(nn.Identity):
    def __init__(self, held=None, buffer=None):
        super().__init__()
        self.held = held
        self.register_buffer("buffer", buffer, persistent=False)

    def one(self, x):
        return x

    def two(self, x):
        return x.clamp(max=6.0)


def hooked(bound):
    module = Holding()
    module.register_forward_hook(lambda module, args, y: y.clamp(max=bound))
    return module


def by_method(name):
    module = Holding()
    module.held = getattr(module, name)
    return module


def one(x: torch.Tensor):
    return x.clamp(max=1.0)


def two(x: torch.Tensor):
    return x.clamp(max=2.0)


PAIRS = {
    "list": ([1.0], [2.0]),
    "dict": ({"bound": 1.0}, {"bound": 2.0}),
    "set": ({1.0}, {2.0}),
    "object": (types.SimpleNamespace(bound=1.0), types.SimpleNamespace(bound=2.0)),
    "slots": (Slotted(1.0), Slotted(2.0)),
    "enum": (Kind.ONE, Kind.TWO),
    "partial": (functools.partial(torch.clamp, max=1.0), functools.partial(torch.clamp, max=2.0)),
    "torch's function": (nn.functional.relu, nn.functional.relu6),
    "built-in function": (torch.minimum, torch.maximum),
    "op": (torch.ops.aten.relu, torch.ops.aten.relu6),
    "class": (nn.ReLU, nn.ReLU6),
    "module": ([nn.Hardtanh(0.0, 1.0)], [nn.Hardtanh(0.0, 2.0)]),
    "dtype": (torch.float32, torch.float64),
    "tensor": (torch.tensor(1.0), torch.tensor(2.0)),
    "scripted function": (torch.jit.script(one), torch.jit.script(two)),
    "array": (np.ones(2), np.zeros(2)),
    "fraction": (Fraction(1, 2), Fraction(1, 3)),
    "getter": (operator.itemgetter(0), operator.itemgetter(1)),
    "deque": (deque([1.0]), deque([2.0])),
    "ufunc": (np.minimum, np.maximum),
}


@pytest.mark.parametrize("what", PAIRS)
def test_what_attributes_hold_is_in_it(what):
    one, other = PAIRS[what]
    assert digest_of_code(Holding(one)) != digest_of_code(Holding(other))
    assert digest_of_code(Holding(one)) == digest_of_code(Holding(one))


def test_methods_hooks_and_forms_of_buffers_are_in_it():
    """Of a buffer not its values, which are read at each call; of hooks not the numbers that the process gives them."""
    assert digest_of_code(by_method("one")) != digest_of_code(by_method("two"))
    assert digest_of_code(hooked(1.0)) != digest_of_code(hooked(2.0))
    assert digest_of_code(hooked(1.0)) == digest_of_code(hooked(1.0))
    of = {size: digest_of_code(Holding(buffer=torch.zeros(size))) for size in (3, 4)}
    assert of[3] != of[4]
    assert of[3] == digest_of_code(Holding(buffer=torch.ones(3)))


def test_odd_things_are_no_hindrance():
    """Modules that make what they are asked for, tensors without strides or values, locks, numbers of generators."""
    odd = [torch.classes, torch.ops, torch.ones(2, device="meta"), threading.Lock(), torch.Generator(), iter([])]
    assert digest_of_code(Holding(odd)) == digest_of_code(Holding(odd))
    sparse, nested = torch.eye(3).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert digest_of_code(Holding([sparse, nested], sparse)) == digest_of_code(Holding([sparse, nested], sparse))


def test_lokas_files_are_in_it(monkeypatch, tmp_path):
    """A site's own Python stands in a trace, too."""
    (tmp_path / "nn").mkdir()
    found = set()
    for text in ("y = x", "y = 2 * x"):
        (tmp_path / "nn" / "leaves.py").write_text(text)
        known = code._known.__wrapped__(tmp_path)
        monkeypatch.setattr(code, "_known", lambda known=known: known)
        found.add(digest_of_code(Holding()))
        monkeypatch.undo()
    assert len(found) == 2


def test_containers_that_hold_themselves_end():
    held = {"value": 1.0}
    held |= {"one": held, "two": [held]}
    first = digest_of_code(Holding(held))
    held["value"] = 2.0
    assert digest_of_code(Holding(held)) != first


def test_functions_in_packages_of_modules_are_in_it():
    def sources(bound):
        package, part = types.ModuleType("mine"), types.ModuleType("mine.part")
        exec(f"def clip(x): return x.clamp(max={bound})", part.__dict__)
        package.part, part.up = part, package
        scope = {"__name__": "mine.model", "mine": package}
        exec("def act(x): return mine.part.clip(x)", scope)
        return digest_of_code(Holding(scope["act"]))

    assert sources(1.0) == sources(1.0)
    assert sources(1.0) != sources(2.0)


class Level(enum.Enum):
    HIGH = 2.0


def test_data_is_what_a_process_does_not_count():
    """Nor are weights, wherever else they are held, and functions; another number anywhere else is seen."""

    def made(**changes):
        model = nn.Linear(4, 4)
        vars(model).update({"log": logging.getLogger("mine"), "held": [model.weight], "act": lambda x: x})
        model.handle = model.register_forward_hook(lambda module, given, made: made)
        options = {
            "share": Fraction(1, 2),
            "deep": [{"x": (1, {2})}],
            "level": Level.HIGH,
            "array": np.arange(3),
            "edge": torch.ones(2),
        }
        options["itself"] = options
        model.options = types.SimpleNamespace(**options | changes)
        return model

    known = data_of(made())
    assert data_of(made(), unsaved=True) == known  # torch's class has no code of its own
    assert known == data_of(made()) == data_of(copy.deepcopy(made()))
    changes = {
        "share": Fraction(1, 3),
        "deep": [{"x": (1, {3})}],
        "level": Level.HIGH.value,
        "array": np.arange(4),
        "edge": torch.zeros(2),
    }
    for name, value in changes.items():
        other = data_of(made(**{name: value}))
        assert [key for key in known if known[key] != other[key]] == ["options"]
