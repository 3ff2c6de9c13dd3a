import itertools
import re
from collections import Counter

import pytest
import torch
from sweeps import sweep
from torch import nn

from loka.core.exceptions import UnknownName
from loka.zoo import build, dense_part, presets
from loka.zoo.dcn import CrossLayer, DCNv2
from loka.zoo.dlrm import DLRM
from loka.zoo.layers import Embeddings, Front, mlp
from loka.zoo.presets import MODELS
from loka.zoo.wukong import FactorizationBlock, Wukong, WukongLayer

VOCAB = (4, 7, 3, 9)
# float64, so that a wrong formula stands clear of rounding.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def rows(count, dense_features=5, dtype=torch.float64):
    sparse = torch.stack([torch.randint(size, (count,)) for size in VOCAB], dim=1)
    return torch.randn(count, dense_features, dtype=dtype), sparse


def linears(model):
    return Counter((m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear))


def published(name, size, sparse_features=26):
    with torch.device("meta"):
        model = build(name, dense_features=13, vocab_sizes=(2,) * sparse_features, size=size)
    return linears(model)


def test_wukong_six_gflop_is_its_papers_row():
    """l 8, n 48 and 48, k 48, MLP 3 x 4096; it is in no suite of shapes."""
    first = [(770, 48), (770, 48), (36960, 4096), (4096, 4096), (4096, 4096), (4096, 7680)]
    others = [(96, 48), (96, 48), (4608, 4096), (4096, 4096), (4096, 4096), (4096, 7680)] * 7
    top = [(15360, 1024), (1024, 512), (512, 1)]
    rest = [(13, 512), (512, 256), (256, 160), (770, 96)]
    assert published("wukong", "6gf", 769) == Counter(first + others + top + rest)


@pytest.mark.parametrize(("name", "size"), sweep(presets(), presets()[::2]))
def test_every_preset_ends_in_one_logit_with_bias(name, size):
    with torch.device("meta"):
        model = build(name, dense_features=13, vocab_sizes=(2,) * 26, size=size)
        logits = model(torch.empty(6, 13), torch.empty(6, 26, dtype=torch.int64))
    assert logits.shape == (6,)
    *_, last = (m for m in model.modules() if isinstance(m, nn.Linear))
    assert last is model.logit
    assert last.out_features == 1
    assert last.bias is not None
    assert all(p.is_meta for p in itertools.chain(model.parameters(), model.buffers()))


def assert_every_parameter_is_trained(model, inputs):
    label = torch.randint(2, (64,)).float()
    nn.functional.binary_cross_entropy_with_logits(model(*inputs), label).backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        grad = parameter.grad.to_dense()
        assert torch.isfinite(grad).all(), path
        assert grad.abs().max() > 0, path
    assert model.front.embeddings.table.weight.grad.is_sparse


@pytest.mark.parametrize("name", MODELS)
def test_small_models_train_every_parameter(name):
    torch.manual_seed(0)
    assert_every_parameter_is_trained(build(name, dense_features=5, vocab_sizes=VOCAB), rows(64, dtype=torch.float32))


@pytest.mark.parametrize("name", MODELS)
def test_small_models_give_the_mods_something_to_do(name):
    kinds = Counter(type(m) for m in build(name, dense_features=5, vocab_sizes=VOCAB).modules())
    assert kinds[nn.SiLU] >= 3
    assert kinds[nn.LayerNorm] >= 3


def test_a_row_does_not_depend_on_its_batch():
    for name in MODELS:
        model = build(name, dense_features=5, vocab_sizes=VOCAB).double()
        dense, sparse = rows(9)
        one = torch.cat([model(dense[i : i + 1], sparse[i : i + 1]) for i in range(9)])
        torch.testing.assert_close(model(dense, sparse), one, **CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_the_dense_part_computes_the_model_from_looked_up_rows(name):
    torch.manual_seed(0)
    model = build(name, dense_features=5, vocab_sizes=VOCAB).double()
    part = dense_part(model)
    dense, sparse = rows(9)
    found = model.front.embeddings(sparse).detach().requires_grad_()
    assert torch.equal(part(dense, found), model(dense, sparse))
    part(dense, found).square().sum().backward()
    model.zero_grad()
    shared = {path: weight for path, weight in model.named_parameters() if "embeddings" not in path}
    assert dict(part.named_parameters()).keys() == shared.keys()
    assert all(weight is shared[path] for path, weight in part.named_parameters())
    modules = dict(model.named_modules())
    for path, module in part.named_modules():
        assert (module is modules[path]) == (path not in ("", "front", "front.embeddings")), path
    # The rows' gradient is the tables'.
    model(dense, sparse).square().sum().backward()
    table = model.front.embeddings.table.weight
    offset = (sparse + model.front.embeddings.offsets).flatten()
    expected = torch.zeros_like(table).index_add_(0, offset, found.grad.flatten(0, 1))
    torch.testing.assert_close(table.grad.to_dense(), expected, **CLOSE)
    assert isinstance(model.front.embeddings, Embeddings), "the model keeps its tables"


def test_the_dense_part_of_mlperf_has_no_tables():
    with torch.device("meta"):
        part = dense_part(build("dcnv2", dense_features=13, vocab_sizes=(1,) * 26, size="mlperf"))
        assert part(torch.empty(6, 13), torch.empty(6, 26, 128)).shape == (6,)
    assert not any(isinstance(module, nn.Embedding) for module in part.modules())
    assert part.cross[0].v.in_features == 27 * 128


def test_the_dense_part_of_another_model_is_refused():
    with pytest.raises(ValueError, match="Linear has no `front`"):
        dense_part(nn.Linear(2, 2))


def test_embeddings_are_separate_tables_in_one():
    embeddings = Embeddings(VOCAB, 6)
    _, sparse = rows(11)
    tables = embeddings.table.weight.split(list(VOCAB))
    naive = torch.stack([table[sparse[:, i]] for i, table in enumerate(tables)], dim=1)
    assert torch.equal(embeddings(sparse), naive)
    assert list(embeddings.state_dict()) == ["table.weight"]
    for table in tables:
        assert table.abs().max() <= len(table) ** -0.5


def test_dlrm_equals_a_loop_over_pairs():
    torch.manual_seed(1)
    model = DLRM(Front(dense_features=5, vocab_sizes=VOCAB, dim=6, bottom=(8,)), top=(16,)).double()
    dense, sparse = rows(7)
    bottom = model.front.dense(dense)
    tokens = [bottom, *model.front.embeddings(sparse).unbind(1)]
    dots = [(tokens[i] * tokens[j]).sum(1) for i in range(5) for j in range(i)]
    expected = model.logit(model.top(torch.cat([bottom, torch.stack(dots, 1)], 1)))[:, 0]
    torch.testing.assert_close(model(dense, sparse), expected, **CLOSE)


@pytest.mark.parametrize("rank", [None, 3])
def test_cross_layer_equals_its_formula(rank):
    layer = CrossLayer(10, rank=rank).double()
    x0, x = torch.randn(2, 4, 10, dtype=torch.float64)
    weight = layer.u.weight if rank is None else layer.u.weight @ layer.v.weight
    for row in range(4):
        expected = x0[row] * (weight @ x[row] + layer.u.bias) + x[row]
        torch.testing.assert_close(layer(x0, x)[row], expected, **CLOSE)


@pytest.mark.parametrize("parallel", [False, True])
def test_dcn_stacks_or_runs_in_parallel(parallel):
    front = Front(dense_features=5, vocab_sizes=VOCAB, dim=3, bottom=None)
    model = DCNv2(front, cross_layers=2, rank=4, deep=(8,), parallel=parallel).double()
    dense, sparse = rows(6)
    vectors = dense[:, :, None] * model.front.dense.vectors
    x0 = torch.cat([vectors, model.front.embeddings(sparse)], dim=1).reshape(6, 27)
    x = x0
    for layer in model.cross:
        x = layer(x0, x)
    last = torch.cat([x, model.deep(x0)], 1) if parallel else model.deep(x)
    torch.testing.assert_close(model(dense, sparse), model.logit(last)[:, 0], **CLOSE)


@pytest.mark.parametrize("attention", [None, (12,)])
def test_factorization_block_equals_the_paper(attention):
    torch.manual_seed(2)
    n, d, k, out = 5, 6, 3, 4
    block = FactorizationBlock(
        tokens=n, dim=d, out_tokens=out, rank=k, hidden=(16,), attention=attention, activation="gelu", norm=True
    ).double()
    x = torch.randn(8, n, d, dtype=torch.float64)
    for row in range(8):
        y = block.project.weight.T  # [n, k]
        if attention is not None:
            y = block.attend((x[row].T @ y).reshape(1, d * k)).reshape(n, k)
        gram = torch.stack([torch.stack([x[row, i] @ x[row, j] for j in range(n)]) for i in range(n)])
        expected = block.mlp(block.norm((gram @ y).reshape(1, n * k))).reshape(out, d)
        torch.testing.assert_close(block(x)[row], expected, **CLOSE)


@pytest.mark.parametrize("tokens", [5, 7])
def test_wukong_layer_equals_the_paper(tokens):
    torch.manual_seed(3)
    d, fm, lc = 6, 4, 3
    layer = WukongLayer(
        tokens=tokens,
        dim=d,
        fm_tokens=fm,
        lc_tokens=lc,
        rank=2,
        hidden=(16,),
        attention=None,
        activation="silu",
        norm=False,
    ).double()
    x = torch.randn(8, tokens, d, dtype=torch.float64)
    linear = torch.einsum("on,bnd->bod", layer.lcb.linear.weight, x)
    # The residual is projected exactly when the count of tokens changes.
    assert isinstance(layer.residual, nn.Identity) == (tokens == fm + lc)
    changes = tokens != fm + lc
    residual = torch.einsum("on,bnd->bod", layer.residual.linear.weight, x) if changes else x
    total = torch.cat([layer.fmb(x), linear], dim=1) + residual
    centred = total - total.mean(-1, keepdim=True)
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + layer.norm.eps).sqrt()
    torch.testing.assert_close(layer(x), expected, **CLOSE)


def test_attentive_wukong_trains_every_parameter():
    torch.manual_seed(4)
    model = Wukong(
        Front(dense_features=0, vocab_sizes=VOCAB, dim=6, bottom=(8,)),
        layers=2,
        fm_tokens=2,
        lc_tokens=2,
        rank=2,
        hidden=(8,),
        top=(8,),
        attention=(8,),
        activation="gelu",
    )
    assert_every_parameter_is_trained(model, rows(64, 0, torch.float32))


@pytest.mark.parametrize(("tasks", "domain"), [(1, None), (3, None), (2, 2)])
def test_each_task_of_mmoe_mixes_the_experts_by_its_gate(tasks, domain):
    torch.manual_seed(0)
    model = build("mmoe", dense_features=5, vocab_sizes=VOCAB, tasks=tasks, domain=domain).double()
    dense, sparse = rows(9)
    tokens = model.front(dense, sparse)
    expected = torch.empty(9, tasks, dtype=torch.float64)
    for row, x in enumerate(tokens.flatten(1)):
        read = x if domain is None else model.front.embeddings(sparse)[row, domain]
        gates = model.gates if domain is None else model.gates[f"column_{domain}"]
        for k, gate in enumerate(gates.weight.chunk(tasks)):
            shares = (gate @ read).softmax(0)
            mixed = sum(share * expert(x) for share, expert in zip(shares, model.experts, strict=True))
            expected[row, k] = model.logit.weight[k] @ model.towers[k](mixed) + model.logit.bias[k]
    torch.testing.assert_close(model(dense, sparse), expected.squeeze(1), **CLOSE)


def test_mlp_order_of_layers():
    kinds = [type(layer) for layer in mlp(3, (4, 5), activation="silu", norm=True)]
    assert kinds == [nn.Linear, nn.LayerNorm, nn.SiLU] * 2
    plain = mlp(3, (4, 5), last_activation=False)
    assert [type(layer) for layer in plain] == [nn.Linear, nn.ReLU, nn.Linear]


def test_unknown_names_list_the_known_ones():
    wrong = [{"name": "dhem"}, {"name": "dlrm", "size": "2gf"}]
    for arguments in wrong:
        with pytest.raises(UnknownName) as error:
            build(**arguments, dense_features=1, vocab_sizes=(2,))
        for name, size in presets():
            assert re.search(rf"{name}: .*\b{re.escape(size)}\b", str(error.value))
    with pytest.raises(UnknownName, match="relu, silu, gelu"):
        mlp(3, (4,), activation="mish")
    with pytest.raises(ValueError, match="its front has 0: give it dense features"):
        build("dlrm", dense_features=0, vocab_sizes=(2, 2))
    with pytest.raises(ValueError, match="its front has 5"):
        DLRM(Front(dense_features=5, vocab_sizes=VOCAB, dim=6, bottom=None), top=(16,))
    for name, why in (("mmoe", "there are 4 sparse"), ("dlrm", "dlrm has no gates")):
        with pytest.raises(ValueError, match=why):
            build(name, dense_features=5, vocab_sizes=VOCAB, domain=4)


@pytest.mark.parametrize("name", MODELS)
def test_another_activation_in_all_mlps(name):
    def kinds(activation):
        model = build(name, dense_features=3, vocab_sizes=VOCAB, activation=activation)
        return [type(m) for m in model.modules() if isinstance(m, nn.ReLU | nn.SiLU | nn.GELU)]

    own, of_mlps = kinds(None), [kind is nn.ReLU for kind in kinds("relu")]  # HSTU's SiLU is its attention's
    assert any(of_mlps)
    assert kinds("gelu") == [nn.GELU if of else kind for of, kind in zip(of_mlps, own, strict=True)]
