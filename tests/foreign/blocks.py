"""A diffusion transformer and an LLM policy's actor: blocks with losses that know no click.

DiT (arXiv 2212.09748): x + gate * f(norm(x) (1 + scale) + shift), the six of a block by one map of the time
and class. Its gates start at zero; here they do not, as after some training. The actor is a decoder block of
the Llama kind, RMSNorm, rotary positions, a gated MLP, and returns what policy gradients are of: the
log-probability of the actions that were taken, [B].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .spec import Foreign, generator, seeded

WIDTH, HEADS, TOKENS, CHANNELS, VOCABULARY, HIDDEN = 48, 3, 6, 16, 80, 96


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """[B, T, WIDTH] each -> the same."""
    heads = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (q, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2).flatten(2)


class DiTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift, scale, gate, *second = self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        q, k, v = self.qkv(F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift).chunk(3, dim=-1)
        x = x + gate * self.out(attend(q, k, v, causal=False))
        shift, scale, gate = second
        return x + gate * self.mlp(F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift)


class DiT(nn.Module):
    """Noisy patches [B, T, C], time [B], class [B] -> the noise [B, T, C]."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(CHANNELS, WIDTH)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02)
        self.time = nn.Sequential(nn.Linear(32, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.classes = nn.Embedding(10, WIDTH)
        self.block = DiTBlock()
        self.last = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.noise = nn.Linear(WIDTH, CHANNELS)

    def forward(self, x: torch.Tensor, time: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        angle = time.unsqueeze(1) * torch.exp(-9.21 * torch.arange(16) / 16)
        condition = self.time(torch.cat([angle.cos(), angle.sin()], dim=1)) + self.classes(kind)
        x = self.block(self.patch(x) + self.places, condition)
        shift, scale = self.last(condition).unsqueeze(1).chunk(2, dim=-1)
        return self.noise(F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Pairs (x_2i, x_2i+1) of each head of [B, T, WIDTH] turn by place * 10000^(-2i/d)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (HEADS, -1, 2)).contiguous())
    half = pairs.shape[-1]
    angle = torch.outer(torch.arange(x.shape[1]), 10000.0 ** (-torch.arange(half) / half))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)).flatten(2)


class Actor(nn.Module):
    """States [B, T], actions [B, T] -> log-probability of the actions of each row [B]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.attention_norm, self.mlp_norm, self.norm = (nn.RMSNorm(WIDTH) for _ in range(3))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(states)
        normed = self.attention_norm(x)
        q, k, v = rotated(self.q(normed)), rotated(self.k(normed)), self.v(normed)
        x = x + self.o(attend(q, k, v, causal=True))
        normed = self.mlp_norm(x)
        x = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        logits = self.head(self.norm(x))
        return logits.log_softmax(-1).gather(2, actions.unsqueeze(2)).squeeze(2).sum(1)


def _noised(rows: int) -> tuple[torch.Tensor, ...]:
    g = generator()
    x = torch.randn(rows, TOKENS, CHANNELS, generator=g)
    return x, 1000 * torch.rand(rows, generator=g), torch.randint(10, (rows,), generator=g)


def _acted(rows: int) -> tuple[torch.Tensor, ...]:
    g = generator()
    return tuple(torch.randint(VOCABULARY, (rows, TOKENS), generator=g) for _ in range(2))


def _denoising(output: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, torch.randn(output.shape, generator=generator(2)))


def _policy_gradient(output: torch.Tensor) -> torch.Tensor:
    """REINFORCE: advantages of both signs, of the mean 0."""
    return -(torch.linspace(-1, 1, len(output)) * output).mean()


_DIT = WIDTH * (32 + WIDTH + 6 * WIDTH + 2 * WIDTH) + TOKENS * WIDTH * (12 * WIDTH + 2 * CHANNELS)
_ACTOR = TOKENS * WIDTH * (4 * WIDTH + 3 * HIDDEN + VOCABULARY)
MODELS = [
    Foreign(
        name="dit",
        build=seeded(DiT),
        inputs=_noised,
        loss=_denoising,
        parameter_gemm_flops=lambda rows: 2 * rows * _DIT,
        notes="A map of the condition, a row a sample, makes shifts, scales and gates of all tokens.",
    ),
    Foreign(
        name="actor",
        build=seeded(Actor),
        inputs=_acted,
        loss=_policy_gradient,
        parameter_gemm_flops=lambda rows: 2 * rows * _ACTOR,
        notes="[B] log-probabilities, which are no logits of clicks.",
    ),
]
