"""A residual model whose layers torch.compile joins into regions, on a CPU with FP8 emulated, or on a GPU."""

import torch
from torch import nn

import loka
from loka.measurement import Settings

device = "cuda" if torch.cuda.is_available() else "cpu"
kernel = "emulated" if device == "cpu" else "torch"
torch.manual_seed(0)


class Block(nn.Module):
    """x + down(gelu(up(norm(x))))"""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


model = nn.Sequential(nn.Linear(13, 64), Block(64, 128), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)


def step(forward: nn.Module) -> float:
    x = torch.randn(256, 13, device=device)
    clicked = (x[:, :4].prod(dim=1, keepdim=True) > 0).float()
    with torch.autocast(device, torch.bfloat16):
        logits = forward(x)
    loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), clicked)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


with loka.Probe(model, every=2, effect_samples=0) as probe:
    for _ in range(4):
        step(model)
name = f"{kernel}:rowwise_e4m3_pow2"
report = loka.measure(
    probe.stats(), device=device, candidates=[name], errors_only=True, settings=Settings(min_draws=2, max_draws=2)
)
# Forced, for layers as small as these are faster in bf16. Sides that are no multiples of 16 are left out.
plan = loka.plan(report, force={"1.*": name, "*": "hp"})
loka.convert(model, plan)
compiled = torch.compile(model)
print("loss by plan", [round(step(compiled), 3) for _ in range(3)])
print(loka.regions(model))
assert loka.regions(model).complete
for site, counts in loka.health_of(model).items():
    print(f"{site}: {counts['runs']} FP8 GEMMs")
loka.revert(model)
