"""A diffusion transformer (arXiv 2212.09748): x + gate * f(norm(x) (1 + scale) + shift), a block's six by one
map of time and class. Its gates start at zero; here they do not, as after some training."""

import torch
import torch.nn.functional as F
from torch import nn

from foreign.spec import generator, per_row

WIDTH, HEADS, TOKENS, CHANNELS = 48, 3, 6, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def attention(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x, condition):
        of_attention, of_mlp = self.modulation(F.silu(condition)).unsqueeze(1).chunk(2, dim=-1)
        for layer, by in ((self.attention, of_attention), (self.mlp, of_mlp)):
            shift, scale, gate = by.chunk(3, dim=-1)
            x = x + gate * layer(F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift)
        return x


class DiT(nn.Module):
    """Noisy patches [B, T, C], time [B], class [B] -> the noise [B, T, C]."""

    def __init__(self):
        super().__init__()
        self.patch, self.classes = nn.Linear(CHANNELS, WIDTH), nn.Embedding(10, WIDTH)
        self.time = nn.Sequential(nn.Linear(32, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.block, self.noise = Block(), nn.Linear(WIDTH, CHANNELS)

    def forward(self, x, time, kind):
        angle = time.unsqueeze(1) * torch.exp(-9.21 * torch.arange(16) / 16)
        condition = self.time(torch.cat([angle.cos(), angle.sin()], dim=1)) + self.classes(kind)
        return self.noise(F.layer_norm(self.block(self.patch(x), condition), (WIDTH,)))


def _noised(rows):
    g = generator()
    x = torch.randn(rows, TOKENS, CHANNELS, generator=g)
    return x, 1000 * torch.rand(rows, generator=g), torch.randint(10, (rows,), generator=g)


_FLOPS = WIDTH * (32 + WIDTH + 6 * WIDTH) + TOKENS * WIDTH * (12 * WIDTH + 2 * CHANNELS)
MODELS = [
    per_row(
        "dit",
        DiT,
        _noised,
        _FLOPS,
        logits=None,
        loss=lambda output: F.mse_loss(output, torch.randn(output.shape, generator=generator(2))),
        notes="A map of the condition, a row a sample, makes shifts, scales and gates of all tokens.",
    )
]
