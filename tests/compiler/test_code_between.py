import pytest
import torch
from between import ALL, Between, Leaky, OfWiderNumbers
from converted import JOINED, converted, error, gradients, plan_for, run
from joint import JointBackend
from models import forced_plan
from small_models import made
from sweeps import sweep
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

import loka
from loka.compiler import gemms
from loka.compiler.edges.cones import cone_of
from loka.compiler.edges.matrix import Matrix
from loka.compiler.gemms import region_gemm
from loka.compiler.kept import kept
from loka.kernels.edge.op import edge
from loka.kernels.edge.program import Kind, program_of

aten = torch.ops.aten


WAYS = [(model, fused) for model in ALL for fused in (False, True)]  # values in 16 bits rounded, or kept in float32


@pytest.mark.parametrize(("model", "fused"), sweep(WAYS, [*WAYS[1::6], (Leaky, True)]))
def test_joined_computes_what_the_model_says(model, fused):
    """As near to the exact model as site by site (test_joined_models.py). A cast that is read wrongly makes
    another model: errors of 0.3 and more."""
    torch.manual_seed(0)
    plain = model()
    x = torch.randn(100, 64)
    plan = plan_for(plain, x)
    eager, joined = (converted(plain, plan) for _ in range(2))
    backend = JointBackend(fused=fused)
    exact, by_site = run(plain, x), run(eager, x)
    found = run(torch.compile(joined, backend=backend, fullgraph=True), x)
    assert loka.regions(joined).complete
    assert backend.count(edge)
    assert not any(n.op == "get_attr" for g in backend.graphs for e in g.nodes if e.target is edge for n in e.args[0])
    truth, theirs, ours = (gradients(each) for each in (plain, eager, joined))
    triples = [(found[0], by_site[0], exact[0]), *((ours[n], theirs[n], truth[n]) for n in truth)]
    for mine, other, right in triples:
        assert error(mine, right) <= 1.3 * error(other, right) + 0.02


@pytest.mark.slow
def test_float32_numbers_are_kept_too():
    """A larger model had NaN where backward made them of a product that it read rounded."""
    plain, x = OfWiderNumbers(), torch.randn(32, 64)
    backend = JointBackend()
    run(torch.compile(converted(plain, plan_for(plain, x)), backend=backend), x)
    (node,) = (node for graph in backend.graphs for node in graph.find_nodes(op="call_function", target=kept))
    assert node.meta["val"].dtype == torch.float32


class LargestOfItsNorm(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(24, 40), nn.LayerNorm(40))

    def forward(self, x):
        return super().forward(x).amax(-1)


def test_a_maximum_of_a_layer_that_is_not_joined_has_its_gradient():
    """Its elements were counted as none, and gradients were NaN, where a graph has no layer that is joined."""
    plain = LargestOfItsNorm()
    x = torch.randn(64, 24)
    plan = plan_for(plain, x)
    eager, apart = (converted(plain, plan) for _ in range(2))
    run(eager, x), run(torch.compile(apart, backend=JointBackend(fused=True)), x)
    for name, theirs in gradients(eager).items():
        assert error(gradients(apart)[name], theirs) < 0.1, name


def test_columns_side_by_side_are_laid_in_rows_for_a_gemm():
    """cuBLASLt refuses others."""
    plain = nn.Linear(64, 32, bias=False)
    x = torch.randn(64, 48).bfloat16().t()
    backend = JointBackend()
    run(torch.compile(converted(plain, plan_for(plain, x)), backend=backend), x)
    data = [node.args[0].meta["val"] for node in backend.graphs[0].find_nodes(op="call_function", target=region_gemm)]
    assert [each.stride() for each in data] == [(64, 1)]


def test_a_number_on_the_cpu_is_no_leaf_of_a_program_on_the_gpu():
    graph = Graph()
    with FakeTensorMode():
        values = torch.empty(32, 64, device="cuda"), torch.empty(())
    nodes = [graph.placeholder(name) for name in ("z", "factor")]
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = value
    scaled = graph.call_function(aten.mul.Tensor, tuple(nodes))
    moved = graph.call_function(aten._to_copy.default, (nodes[1],), {"device": torch.device("cuda")})
    shifted = graph.call_function(aten.add.Tensor, (scaled, moved))
    for node in (scaled, shifted):
        node.meta["val"] = values[0]
    with FakeTensorMode():
        moved.meta["val"] = torch.empty((), device="cuda")
    cone = cone_of(shifted, Matrix(rows=32, features=64), {}, set())
    assert cone.inside == {shifted}
    assert cone.leaves == {scaled: Kind.FULL, moved: Kind.SCALAR}


class Cross(nn.Module):
    """Cross layers with biases of their own: under autocast what they add up is float32."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(layers))
        self.biases = nn.ParameterList(torch.zeros(64) for _ in range(layers))

    def forward(self, x0):
        x = x0
        for layer, bias in zip(self.layers, self.biases, strict=True):
            x = x0 * (layer(x) + bias) + x
        return x


@pytest.mark.parametrize("layers", [3, 8])
def test_a_stream_is_written_where_that_is_cheaper_than_what_it_is_made_of(layers):
    """A float32 matrix, written and read, is as many bytes as four of bfloat16."""
    plain = Cross(layers)
    x = torch.randn(48, 64).bfloat16()
    plan = plan_for(plain, x)
    joined = converted(plain, plan)
    backend = JointBackend()
    found, expected = run(torch.compile(joined, backend=backend), x), run(plain, x)
    assert error(found[0], expected[0]) < 0.1
    forward = backend.graphs[0]
    edges = [program_of(node.args[5]) for node in forward.nodes if node.target is edge]
    given = [place for place, program in enumerate(edges) if program.values]
    # Of x1, x2, ...: x4 is made of x0 and four others, x6 of x0, x4 and two others.
    assert given == ([] if layers == 3 else [3, 5])
    assert all(program.leaves.count(Kind.FULL) <= 5 for program in edges)


@pytest.mark.parametrize("name", sweep(("residual", "gated"), ("gated",)))
def test_a_stream_is_given_once_and_all_that_follows_from_it_is_not(name):
    """What a norm makes of it, and copies in float32, are computed anew; sums for norms come out of edges."""
    plain = nn.Sequential(made(name), made(name))
    x = torch.randn(48, 64).bfloat16()
    plan = plan_for(plain, x)
    backend = JointBackend()
    run(torch.compile(loka.convert(plain, plan), backend=backend), x)
    forward = [program_of(n.args[5]) for n in backend.graphs[0].nodes if n.target is edge]
    for program in forward:
        matrices = [
            dtype
            for place, dtype in zip(program.values, program.value_dtypes, strict=True)
            if program.kinds[place] is Kind.FULL
        ]
        assert matrices in ([], ["bfloat16"])
    summed = [node for node in backend.graphs[1].nodes if node.target is aten.sum.dim_IntList]
    over_rows = [node for node in summed if 0 in node.args[1]]
    first_norm = 1 if name == "gated" else 2  # no site below it
    assert len(over_rows) == first_norm


SHORT, FEW, NARROW, OWN = (512, 1040, 16), (2048, 48, 16), (2048, 1040, 32), (2048, 1040, 16)


@pytest.mark.parametrize(("width", "rows", "narrow"), sweep([SHORT, FEW, NARROW, OWN], [FEW, NARROW]))
def test_readers_scale_products_of_short_sums_few_tiles_and_narrow_to_the_last_bit(width, rows, narrow, monkeypatch):
    """Scales are powers of two; a GEMM of long sums and many tiles has them of its own, and gives what it gives
    eagerly."""
    monkeypatch.setattr(gemms, "_FEW", 8)  # 432 are 55,296 rows of 32
    monkeypatch.setattr(gemms, "_NARROW", narrow)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(width, 32, bias=False), nn.SiLU(), nn.Linear(32, 16, bias=False))
    x = torch.randn(rows, width).bfloat16() * torch.exp2(torch.arange(rows) % 48 - 24)[:, None]
    plan = plan_for(plain, x)
    eager, joined = (converted(plain, plan) for _ in range(2))
    products = []
    eager[0].register_forward_hook(lambda module, args, y: products.append(y.detach()))
    run(eager, x)
    backend = JointBackend()
    run(torch.compile(joined, backend=backend), x)
    first = next(n for n in backend.graphs[0].nodes if n.target is region_gemm)
    assert (first.args[1].meta["val"].numel() == 1) == ((width, rows, narrow) != OWN)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        inner = torch.compile(joined[0], backend=JointBackend())
        twice = torch.compile(lambda z: inner(z) * 2.0, backend=JointBackend())(x)
    assert torch.equal(twice, products[0] * 2.0)


@pytest.mark.parametrize("most", [None, 64, 1 << 17])
def test_of_any_number_of_rows_the_most_decides(most):
    """A package knows it, where rows are a symbol."""
    plain, x = nn.Sequential(nn.Linear(2048, 32, bias=False), nn.SiLU(), nn.Linear(32, 16)), torch.randn(48, 2048)
    joined, backend = converted(plain, plan_for(plain, x)), JointBackend()
    if most is not None:
        torch._dynamo.mark_dynamic(x, 0, min=2, max=most)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.compile(joined, backend=backend, dynamic=most is None or None)(x)
    first = next(node for node in backend.graphs[0].nodes if node.target is region_gemm)
    assert (first.args[1].target is aten.full.default) == (most == 64)  # the scale of one that readers apply


def test_what_is_concatenated_has_its_scales_already():
    """Of many terms: few tiles alone are no reason to ask for the scales there."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(2048, 64, bias=False), nn.Linear(96, 16, bias=False)

        def forward(self, x):
            return self.last(torch.cat([self.first(x), x[:, :32]], dim=1).sigmoid())

    plain, x = Tokens(), torch.randn(48, 2048)
    joined, backend = converted(plain, plan_for(plain, x)), JointBackend()
    run(torch.compile(joined, backend=backend), x)
    first = next(node for node in backend.graphs[0].nodes if node.target is region_gemm)
    assert first.args[1].meta["val"].numel() == 48


class Streams(Between):
    """A value that is read as rows by a layer, and by others as it was."""

    def forward(self, x):
        z = torch.log1p(x * x) + x
        return super().forward(z) + z[..., :32]

    def code(self, h):
        return h


def test_symbolic_rows_are_a_product_of_sizes_of_inputs():
    """Else the kernel that gives z away asks for its rows the view that a layer has of z."""
    torch.manual_seed(0)
    plain = Streams()
    x = torch.randn(5, 8, 64)
    joined = converted(plain, plan_for(plain, x))
    found = run(torch.compile(joined, backend=JointBackend(), dynamic=True), x)
    assert loka.regions(joined).complete
    assert error(found[0], run(plain, x)[0]) < 0.1


class Towers(Between):
    def forward(self, x):
        return super().forward(x) + super().forward(x)

    def code(self, h):
        return h


def test_no_kernel_of_backward_needs_what_comes_after_it():
    """The second tower's kernel gives the scales of x to the first one, which so comes from both."""
    plain = Towers()
    x = torch.randn(40, 64).bfloat16()
    joined = converted(plain, plan_for(plain, x))
    found = run(torch.compile(joined, backend=JointBackend()), x)
    assert error(found[0], run(plain, x)[0]) < 0.1


class Across(Between):
    """A stream with features outside and tokens inside, which is viewed by that, and returned."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        z = self.mix(x.transpose(1, 2)).transpose(1, 2) + x
        return super().forward(z), self.mix(z.transpose(1, 2)), z

    def code(self, h):
        return h


def test_what_lies_across_still_does():
    plain = Across()
    x = torch.randn(5, 8, 64)
    with loka.Probe(plain, every=1, effect_samples=0) as probe:
        sum(each.sum() for each in plain(x)).backward()
    joined = converted(plain, forced_plan(probe.stats(), JOINED))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found, expected = torch.compile(joined, backend=JointBackend())(x), plain(x)
    assert [each.stride() for each in found] == [each.stride() for each in expected]
    assert all(error(mine.float(), right.float()) < 0.1 for mine, right in zip(found, expected, strict=True))
