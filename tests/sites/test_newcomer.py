import copy

import pytest
import torch
import torch.nn.functional as F
from forced import QUICK, ran, runs
from oracle import SiteBySite, assert_close, assert_same_gradients, gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

import loka

ITEMS, WIDTH, HEADS, TOKENS, ROWS = 70, 48, 3, 6, 40
CANDIDATES = ["emulated:rowwise_e4m3", "emulated:tensorwise_e4m3"]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(HEADS, WIDTH, 16) / 7) for _ in range(3))
        self.back = nn.Parameter(torch.randn(HEADS, 16, WIDTH) / 7)

    def forward(self, x):
        q, k, v = (torch.einsum("bti,hio->bhto", x, weight) for weight in (self.q, self.k, self.v))
        scores = torch.softmax(torch.einsum("bhto,bhso->bhts", q, k) / 4, dim=-1)
        return x + torch.einsum("bhto,hoi->bti", torch.einsum("bhts,bhso->bhto", scores, v), self.back)


class GatedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 7)
        self.gate = nn.Parameter(torch.randn(WIDTH, 3) / 7)

    def forward(self, x):
        made = torch.bmm(x.expand(3, *x.shape), self.experts)
        return (torch.softmax(x @ self.gate, dim=-1).t().unsqueeze(-1) * torch.relu(made)).sum(dim=0)


class Newcomer(nn.Module):
    """History -> {"click": one logit, "next": a score of every item}; an MLP of odd widths, a tied head."""

    def __init__(self, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.attention = Attention()
        self.experts = GatedExperts()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 53), nn.LayerNorm(53), nn.SiLU(), nn.Linear(53, 1))

    def user(self, history):
        return self.experts(self.attention(self.items(history)).mean(dim=1))

    def forward(self, history):
        again = self.recompute
        user = checkpoint(self.user, history, use_reentrant=False) if again else self.user(history)
        return {"click": self.mlp(user), "next": F.linear(user, self.items.weight)}


def newcomer(recompute=False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Newcomer(recompute)


def loss_of(output, history):
    click = (history.sum(dim=1, keepdim=True) % 2).float()
    return F.binary_cross_entropy_with_logits(output["click"], click) + F.cross_entropy(output["next"], history[:, 0])


def train(model, steps, call=None):
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for step in range(steps):
        history = torch.randint(ITEMS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(step % 3))
        loss = loss_of((call or model)(history), history)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_newcomers_model_goes_through_all_of_it(tmp_path):
    """Each part reads what the part before has saved; the numbers are held against the oracle and the plain
    run.
    """
    model, unwatched = newcomer(), newcomer()
    with loka.Probe(model, every=2, logits=lambda output: output["click"], save_to=tmp_path / "stats") as probe:
        losses = train(model, 6)
    assert losses == train(unwatched, 6), "probing changes no bit"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), unwatched.parameters(), strict=True))

    stats = loka.Stats.load(tmp_path / "stats")
    assert stats.layers.keys() == probe.stats().layers.keys()
    assert stats.coverage.seen == 1.0
    assert set(stats.layers) == {
        "attention.q", "attention.k", "attention.v", "attention.back", "experts.gate", "mlp.0", "mlp.3",
        "items", *(f"experts.experts[{place}]" for place in range(3)),
    }  # fmt: skip
    assert all(layer.effects for path, layer in stats.layers.items() if "items" not in path)

    report = loka.measure(stats, device="cpu", candidates=CANDIDATES, errors_only=True, settings=QUICK)
    report.save(tmp_path / "report.json")
    report = loka.Report.load(tmp_path / "report.json")
    chosen = loka.plan(report, loka.Budget())
    assert any(decision.candidate != "hp" for decision in chosen.decisions.values())
    plan = loka.plan(report, loka.Budget(), force={"*": CANDIDATES[0]})
    plan.save(tmp_path / "plan.json")
    plan = loka.Plan.load(tmp_path / "plan.json")
    assert plan == loka.plan(report, loka.Budget(), force={"*": CANDIDATES[0]})
    assert "% of the step's matmul FLOPs" in str(plan)
    sites = set(plan.decisions)
    assert len({site.rpartition("/")[0] for site in sites}) == len(stats.layers)

    weights = copy.deepcopy(model.state_dict())
    history = torch.randint(ITEMS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(9))
    expected, model = newcomer(), loka.convert(model, plan)
    expected.load_state_dict(weights)
    model.zero_grad()
    with SiteBySite(expected):
        wanted = loss_of(expected(history), history)
        wanted.backward()
    loss = loss_of(model(history), history)
    loss.backward()
    assert_close(loss, wanted)
    assert_same_gradients(model, gradients(expected))
    assert ran(model) == sites

    low, high = train(model, 5), train(unwatched, 5)
    assert low == pytest.approx(high, rel=0.05)
    loka.check_finite(model)

    state = copy.deepcopy(model.state_dict())
    torch.save(state, tmp_path / "weights.pt")
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = runs(model)
    loss = loss_of(compiled(history), history)
    loss.backward()
    assert {site for site, count in runs(model).items() if count > before[site]} == sites
    recomputed = loka.convert(newcomer(recompute=True), plan)
    recomputed.load_state_dict(torch.load(tmp_path / "weights.pt"))
    again = loss_of(recomputed(history), history)
    again.backward()
    assert_close(loss, again)
    assert_same_gradients(model, gradients(recomputed))
    assert ran(recomputed) == sites

    plain = newcomer()
    assert list(state) == list(plain.state_dict())
    plain.load_state_dict(state)
    loka.revert(model)
    for name, output in model(history).items():
        assert torch.equal(output, plain(history)[name])
    assert not runs(model)
    for ours, theirs in zip(model.modules(), plain.modules(), strict=True):
        assert set(vars(ours)) - {"_is_torch_compile"} == set(vars(theirs))  # torch.compile leaves its mark
