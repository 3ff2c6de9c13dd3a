import pytest
import torch

from loka.zoo import build
from loka.zoo.attention import AttentionPool, SelfAttention, rotate
from loka.zoo.dhen import AttentionInteraction, CrossInteraction, DHENLayer, DotInteraction
from loka.zoo.layers import TokenLinear
from loka.zoo.sequences.interformer import Gate, MaskNet, PersonalizedFFN, SequenceSummary

# float64, so that a wrong formula stands clear of rounding.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def tokens(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def normed(x, eps=1e-5):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("rotary", [False, True])
def test_attention_equals_torchs(rotary):
    """Against `scaled_dot_product_attention`, head by head, a padded row included."""
    attention = SelfAttention(8, heads=2, rotary=rotary).double()
    x, seen = tokens(3, 5, 8), torch.ones(3, 5, dtype=torch.bool)
    seen[1, 3:] = False
    q, k, v = attention.qkv(x).split(8, dim=2)
    heads = []
    for first in (0, 4):
        part = [t[..., first : first + 4] for t in (q, k, v)]
        if rotary:
            part[:2] = [rotate(t) for t in part[:2]]
        heads.append(torch.nn.functional.scaled_dot_product_attention(*part, attn_mask=seen[:, None, :]))
    torch.testing.assert_close(attention(x, seen), attention.out(torch.cat(heads, 2)), **CLOSE)


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = (tokens(6).expand(9, 6) for _ in range(2))
    scores = rotate(q) @ rotate(k).T
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), **CLOSE)
    assert not torch.allclose(scores[0, 1], scores[0, 2])
    # A unit vector of pair 2 of 3 at place 3 has turned by 3 * 10000^(-2 / 3) radians.
    unit = torch.eye(6, dtype=torch.float64)[2]
    angle = torch.tensor(3 * 10000 ** (-2 / 3), dtype=torch.float64)
    expected = torch.stack([angle.cos(), angle.sin()])
    torch.testing.assert_close(rotate(unit.expand(4, 6))[3, [2, 5]], expected, **CLOSE)


def test_pooling_reads_a_set():
    pool = AttentionPool(8, heads=2, outputs=3).double()
    x, seen = tokens(2, 5, 8), torch.tensor([[True] * 4 + [False], [False] * 5])
    found = pool(x, seen)
    torch.testing.assert_close(pool(x[:, [2, 0, 3, 1, 4]], seen), found, **CLOSE)
    torch.testing.assert_close(pool(x[:, :4])[0], found[0], **CLOSE)
    torch.testing.assert_close(found[1], pool.out.bias.expand(3, 8), **CLOSE)
    k, v = pool.kv(x[0, :4]).split(8, dim=1)
    heads = [(pool.queries[h] @ k[:, 4 * h : 4 * h + 4].T / 2).softmax(1) @ v[:, 4 * h : 4 * h + 4] for h in (0, 1)]
    torch.testing.assert_close(found[0], pool.out(torch.cat(heads, 1)), **CLOSE)


@pytest.mark.parametrize("compressed", [3, 9])
def test_dot_interaction_equals_a_loop_over_pairs(compressed):
    dot = DotInteraction(5, 4, out_tokens=2, dot_tokens=compressed).double()
    x = tokens(3, 5, 4)
    used = torch.einsum("on,bnd->bod", dot.compress.linear.weight, x) if compressed == 3 else x
    n = min(compressed, 5)
    pairs = [(used[:, i] * used[:, j]).sum(1) for i in range(n) for j in range(i)]
    torch.testing.assert_close(dot(x), dot.out(torch.stack(pairs, 1)).reshape(3, 2, 4), **CLOSE)


def test_cross_interaction_is_a_cross_layer_and_a_map_over_tokens():
    cross = CrossInteraction(5, 4, out_tokens=2, rank=3).double()
    x = tokens(3, 5, 4)
    flat = x.reshape(3, 20)
    inner = cross.cross
    u = flat * (flat @ (inner.u.weight @ inner.v.weight).T + inner.u.bias) + flat
    expected = torch.einsum("on,bnd->bod", cross.out.linear.weight, u.reshape(3, 5, 4))
    torch.testing.assert_close(cross(x), expected, **CLOSE)


def test_attention_interaction_is_a_transformer_encoder_layer():
    """nn.TransformerEncoderLayer with the same weights, then the map over tokens."""
    ours = AttentionInteraction(5, 8, out_tokens=2, heads=2, hidden=6, activation="relu").double()
    theirs = torch.nn.TransformerEncoderLayer(8, 2, 6, dropout=0.0, batch_first=True).double()
    parts = {
        "self_attn.in_proj_weight": ours.attention.qkv.weight,
        "self_attn.in_proj_bias": ours.attention.qkv.bias,
        "self_attn.out_proj.weight": ours.attention.out.weight,
        "self_attn.out_proj.bias": ours.attention.out.bias,
        "linear1.weight": ours.feed[0].weight,
        "linear1.bias": ours.feed[0].bias,
        "linear2.weight": ours.feed[2].weight,
        "linear2.bias": ours.feed[2].bias,
    }
    theirs.load_state_dict({**theirs.state_dict(), **parts})
    x = tokens(3, 5, 8)
    expected = torch.einsum("on,bnd->bod", ours.out.linear.weight, theirs(x))
    torch.testing.assert_close(ours(x), expected, **CLOSE)


@pytest.mark.parametrize("n", [4, 5])
def test_dhen_layer_equals_the_paper(n):
    parts = {"one": TokenLinear(n, 2), "two": TokenLinear(n, 2)}
    layer = DHENLayer(n, 6, interactions=parts, module_tokens=2).double()
    x = tokens(3, n, 6)
    # The residual is projected exactly when the count of tokens changes.
    residual = x if n == 4 else torch.einsum("on,bnd->bod", layer.residual.linear.weight, x)
    expected = normed(torch.cat([parts["one"](x), parts["two"](x)], dim=1) + residual)
    torch.testing.assert_close(layer(x), expected, **CLOSE)


def test_pffn_gives_each_row_a_map_of_its_own():
    pffn = PersonalizedFFN(4, context_tokens=2).double()
    x_sum, s = tokens(3, 2, 4), tokens(3, 5, 4)
    for row in range(3):
        weight = pffn.generate(x_sum[row].reshape(8)).reshape(4, 4)
        torch.testing.assert_close(pffn(x_sum, s)[row].T, weight @ s[row].T, **CLOSE)


def test_gate_and_mask():
    gate, mask = Gate(4).double(), MaskNet(4, activation="silu").double()
    z = tokens(3, 2, 4)
    torch.testing.assert_close(gate(z), normed(z * torch.sigmoid(gate.linear(z))), **CLOSE)
    torch.testing.assert_close(mask(z), normed(mask.linear(z * mask.mask(z))), **CLOSE)


def test_the_summary_takes_cls_pooled_and_recent_tokens():
    summary = SequenceSummary(4, heads=1, cls=2, pooled=1, recent=2).double()
    read = []
    summary.gate.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    s, lengths = tokens(3, 2 + 4, 4), torch.tensor([4, 1, 0])
    seen = torch.arange(6) < (2 + lengths)[:, None]
    summary(s, seen, lengths)
    (found,) = read
    torch.testing.assert_close(found[:, :2], s[:, :2], **CLOSE)
    torch.testing.assert_close(found[:, 2:3], summary.pool(s, seen), **CLOSE)
    zero = torch.zeros(4, dtype=torch.float64)
    # Events are tokens 2 to 5; the newest first.
    expected = [torch.stack([s[0, 5], s[0, 4]]), torch.stack([s[1, 2], zero]), torch.stack([zero, zero])]
    torch.testing.assert_close(found[:, 3:], torch.stack(expected), **CLOSE)


def test_layers_interleave():
    """In every layer X learns from S and S from X; without a history S is the categorical features."""
    torch.manual_seed(0)
    model = build("interformer", dense_features=5, vocab_sizes=(4, 7, 3)).double()
    dense, sparse = tokens(2, 5), torch.tensor([[1, 2, 0], [3, 6, 2]])
    x = model.front(dense, sparse)
    s = torch.cat([model.contexts[0](x), model.mask_net(x[:, 1:])], dim=1)
    lengths = torch.tensor([3, 3])
    seen = torch.ones(2, 7, dtype=torch.bool)
    *before, after = model.contexts
    for context, layer in zip(before, model.layers, strict=True):
        personal = layer.pffn(context(x), s)
        both = torch.cat([x, layer.summary(s, seen, lengths)], dim=1)
        x = layer.mlp(layer.interaction(both).reshape(2, -1)).reshape(2, 4, 16)
        s = layer.norm(personal + layer.attention(personal, seen))
    last = torch.cat([after(x), model.summary(s, seen, lengths)], dim=1).reshape(2, -1)
    torch.testing.assert_close(model(dense, sparse), model.logit(model.top(last))[:, 0], **CLOSE)
