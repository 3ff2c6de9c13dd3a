"""A model that LoKA has never seen, through the whole loop on a CPU or a GPU."""

import torch
from torch import nn

import loka

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(13, 479), nn.LayerNorm(479), nn.SiLU(), nn.Linear(479, 333), nn.SiLU(), nn.Linear(333, 1)
)
print(loka.mods.apply(model, [loka.mods.NoBias(), loka.mods.BlockNorm(256), loka.mods.HardSwish()]))
model.to(device)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)


def train(steps: int) -> float:
    loss = torch.tensor(0.0)
    for _ in range(steps):
        x = torch.randn(128, 13, device=device)
        clicked = (x[:, :4].prod(dim=1, keepdim=True) > 0).float()
        with torch.autocast(device, torch.bfloat16):
            logits = model(x)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


with loka.Probe(model, every=5) as probe:
    print("bf16 loss", train(20))
plan = loka.plan(loka.measure(probe.stats(), device=device))
print(plan)
loka.convert(model, plan)
print("loss by plan", train(20))
for site, counts in loka.health_of(model).items():
    print(f"{site}: {counts['runs']} FP8 GEMMs")
loka.revert(model)
