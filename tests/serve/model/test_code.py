"""Which changes of a model's code its digest sees (serve/model/code.py)."""

import functools

import pytest
import torch
from torch import nn

from loka.serve.model.code import digest_of_code

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
