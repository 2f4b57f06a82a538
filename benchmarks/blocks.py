"""Times whole transformer blocks of known models, forward and backward, in bfloat16, with each schedule.

16,384 tokens in all, weights and inputs random, no recomputation, torch's eager mode. A step is the block's
output and the gradients of its input and of all its weights. Systems are timed in turns, round after round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dash_flash_attn.lab import clocks

from . import harness, tables
from .accuracy import oracle
from .harness import Row
from .shapes import Shape
from .systems import AUTO, OURS, UNORDERED, System, add_arguments, behind_auto, chosen, with_auto

TOKENS = 16384

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""q, k, v (batch, seqlen, heads, head_dim) and whether the mask is causal, to out."""


@dataclass(frozen=True)
class Model:
    """The sizes of one model's block.

    Args:
        name: as the tables show it.
        kind: which module below it is.
        hidden: numbers a token.
        heads, kv_heads, head_dim: of the attention.
        mlp: the perceptron's width; of one expert, where there are several.
        seqlens: sequence lengths of the full form, and the one of the quick form. Of images only, where
            `extra` text tokens are attended to beside them.
        quick: the quick form's length.
        source: where the sizes are written.
        experts: how many, of which each token takes two.
        qkv_bias: whether q, k and v have a bias.
        rope_base: of the rotary position embedding.
        extra: text tokens.
    """

    name: str
    kind: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    seqlens: tuple[int, ...]
    quick: int
    source: str
    experts: int = 1
    qkv_bias: bool = False
    rope_base: float = 0.0
    extra: int = 0

    @property
    def causal(self) -> bool:
        """Whether its attention has a causal mask."""
        return self.kind == "language"


LENGTHS = (2048, 4096, 8192, 16384)

MODELS = (
    Model(
        "LLaMA3-8B", "language", 4096, 32, 8, 128, 14336, LENGTHS, 4096,
        "config.json of meta-llama/Meta-Llama-3-8B", rope_base=5e5,
    ),
    Model(
        "Qwen2.5-7B", "language", 3584, 28, 4, 128, 18944, LENGTHS, 4096,
        "config.json of Qwen/Qwen2.5-7B", qkv_bias=True, rope_base=1e6,
    ),
    Model(
        "Mixtral-8x7B", "language", 4096, 32, 8, 128, 14336, LENGTHS, 4096,
        "config.json of mistralai/Mixtral-8x7B-v0.1", experts=8, rope_base=1e6,
    ),
    # 512 and 1024 pixels a side: 16 pixels a token. The text is 77 tokens of CLIP and 256 of T5. The second
    # attention over the image alone, which its first 13 layers have too, is left out.
    Model(
        "Stable Diffusion 3.5 Medium", "joint", 1536, 24, 24, 64, 6144, (1024, 4096), 4096,
        "transformer/config.json of stabilityai/stable-diffusion-3.5-medium", extra=333,
    ),
    # 512 and 1024 pixels a side, 16 pixels a token. The relative position bias of its scores is left out.
    Model(
        "SAM ViT-L", "vision", 1024, 16, 16, 64, 4096, (1024, 4096), 4096,
        "segment_anything/build_sam.py of facebookresearch/segment-anything", qkv_bias=True,
    ),
)  # fmt: skip
"""The blocks of the paper's end-to-end figure."""


class SwiGlu(nn.Module):
    """A gated perceptron."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) to the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _Permute(torch.autograd.Function):
    """Rows in another order. A look-up's own gradient would be summed with atomic additions."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx, dx):
        (inverse,) = ctx.saved_tensors
        return dx[inverse], None, None


class TwoExperts(nn.Module):
    """Each token's two most likely experts of several, weighted."""

    def __init__(self, hidden: int, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(SwiGlu(hidden, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, hidden) to the same."""
        tokens = x.flatten(0, 1)
        best, taken = self.router(tokens).float().topk(2, dim=-1)
        weights = best.softmax(-1).to(x.dtype)
        order = taken.flatten().argsort(stable=True)
        inverse = order.argsort()
        twice = tokens.unsqueeze(1).expand(-1, 2, -1).flatten(0, 1)
        counts = taken.flatten().bincount(minlength=len(self.experts)).tolist()
        parts = _Permute.apply(twice, order, inverse).split(counts)
        done = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        back = _Permute.apply(done, inverse, order).unflatten(0, (-1, 2))
        return (back * weights.unsqueeze(-1)).sum(1).view_as(x)


class LanguageBlock(nn.Module):
    """A decoder layer: grouped-query attention with rotary positions, and a gated perceptron or experts."""

    def __init__(self, model: Model, seqlen: int) -> None:
        super().__init__()
        self.model = model
        wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.norm1, self.norm2 = (nn.RMSNorm(model.hidden, eps=1e-5) for _ in range(2))
        self.q = nn.Linear(model.hidden, wide, bias=model.qkv_bias)
        self.k, self.v = (nn.Linear(model.hidden, narrow, bias=model.qkv_bias) for _ in range(2))
        self.out = nn.Linear(wide, model.hidden, bias=False)
        if model.experts > 1:
            self.mlp: nn.Module = TwoExperts(model.hidden, model.mlp, model.experts)
        else:
            self.mlp = SwiGlu(model.hidden, model.mlp)
        powers = torch.arange(0, model.head_dim, 2) / model.head_dim
        angles = torch.arange(seqlen).unsqueeze(1) * model.rope_base**-powers
        self.register_buffer("cos", angles.cos().unsqueeze(1))
        self.register_buffer("sin", angles.sin().unsqueeze(1))

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """(batch, seqlen, hidden) to the same."""
        y = self.norm1(x)
        q, k, v = (p(y).unflatten(-1, (-1, self.model.head_dim)) for p in (self.q, self.k, self.v))
        x = x + self.out(attention(self._rotated(q), self._rotated(k), v, True).flatten(2))
        return x + self.mlp(self.norm2(x))

    def _rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), dim=-1)


class Stream(nn.Module):
    """What images, or the text beside them, have of their own in a joint block."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.modulation = nn.Linear(model.hidden, 6 * model.hidden)
        self.norm = nn.LayerNorm(model.hidden, eps=1e-6, elementwise_affine=False)
        self.qkv = nn.Linear(model.hidden, 3 * model.hidden)
        self.norm_q, self.norm_k = (nn.RMSNorm(model.head_dim, eps=1e-6) for _ in range(2))
        self.out = nn.Linear(model.hidden, model.hidden)
        self.up, self.down = nn.Linear(model.hidden, model.mlp), nn.Linear(model.mlp, model.hidden)

    def modulations(self, condition: Tensor) -> tuple[Tensor, ...]:
        """(batch, hidden) to six of (batch, 1, hidden): shift, scale and gate, twice."""
        return self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)

    def heads(self, x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, (batch, tokens, heads, head_dim)."""
        qkv = self.qkv(self.norm(x) * (1 + scale) + shift).unflatten(-1, (3, self.model.heads, -1))
        q, k, v = qkv.unbind(2)
        return self.norm_q(q), self.norm_k(k), v

    def rest(self, x: Tensor, attended: Tensor, gates: Sequence[Tensor]) -> Tensor:
        """What follows the attention; gates are the last four modulations."""
        gate1, shift, scale, gate2 = gates
        x = x + gate1 * self.out(attended.flatten(2))
        y = self.norm(x) * (1 + scale) + shift
        return x + gate2 * self.down(F.gelu(self.up(y), approximate="tanh"))


class JointBlock(nn.Module):
    """Image and text tokens with weights of their own, and one attention over both."""

    def __init__(self, model: Model, seqlen: int) -> None:
        super().__init__()
        self.model, self.seqlen = model, seqlen
        self.streams = nn.ModuleList(Stream(model) for _ in range(2))

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """(batch, image and text tokens, hidden) to the same."""
        # The condition (time step and pooled text in the model) is any vector.
        condition = x.mean(1)
        parts = x.split((self.seqlen, self.model.extra), dim=1)
        modulations = [stream.modulations(condition) for stream in self.streams]
        heads = [s.heads(y, *m[:2]) for s, y, m in zip(self.streams, parts, modulations, strict=True)]
        q, k, v = (torch.cat(pair, dim=1) for pair in zip(*heads, strict=True))
        attended = attention(q, k, v, False).split((self.seqlen, self.model.extra), dim=1)
        done = [
            stream.rest(y, a, m[2:])
            for stream, y, a, m in zip(self.streams, parts, attended, modulations, strict=True)
        ]
        return torch.cat(done, dim=1)


class VisionBlock(nn.Module):
    """An image encoder's layer with attention over the whole image."""

    def __init__(self, model: Model, seqlen: int) -> None:
        super().__init__()
        self.model = model
        self.norm1, self.norm2 = (nn.LayerNorm(model.hidden, eps=1e-6) for _ in range(2))
        self.qkv = nn.Linear(model.hidden, 3 * model.hidden, bias=model.qkv_bias)
        self.out = nn.Linear(model.hidden, model.hidden)
        self.up, self.down = nn.Linear(model.hidden, model.mlp), nn.Linear(model.mlp, model.hidden)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """(batch, tokens, hidden) to the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.model.heads, -1)).unbind(2)
        x = x + self.out(attention(q, k, v, False).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


KINDS = {"language": LanguageBlock, "joint": JointBlock, "vision": VisionBlock}


class BlockCell(NamedTuple):
    """One model at one sequence length."""

    model: Model
    seqlen: int

    def __str__(self) -> str:
        return f"{self.model.name}, {self.seqlen} tokens"


FULL = tuple(BlockCell(model, seqlen) for model in MODELS for seqlen in model.seqlens)
QUICK = tuple(BlockCell(model, model.quick) for model in MODELS)


def measure_cell(
    cell: BlockCell,
    systems: Sequence[System],
    rounds: int,
    *,
    clock: clocks.Clock = clocks.few_calls,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    tokens: int = TOKENS,
) -> list[Row]:
    """A row for each system: milliseconds of a step, and whether a second step gave the same bits.

    Args:
        cell: what to time.
        systems: with which attention.
        rounds: how often each is timed.
        clock: times one step.
        device, dtype: of all tensors.
        tokens: in all sequences together, without the text.
    """
    model, seqlen = cell
    torch.manual_seed(0)
    with torch.device(device):
        block = KINDS[model.kind](model, seqlen).to(dtype)
        batch = tokens // seqlen
        x, dout = (torch.randn(batch, seqlen + model.extra, model.hidden, dtype=dtype) for _ in range(2))
    wanted = [x.requires_grad_(), *block.parameters()]

    def step(system: System) -> tuple[Tensor, ...]:
        return torch.autograd.grad(block(x, system.attention), wanted, dout)

    attended = Shape(model.head_dim, model.causal, seqlen + model.extra, batch, model.heads, model.kv_heads)
    alias = behind_auto([s.name for s in systems], attended)
    rows = {system.name: {**describe(cell), "system": system.name} for system in systems}
    runs = {}
    for system in systems:
        if system.name == AUTO and alias:
            continue
        try:
            first, second = step(system), step(system)
            same = all(oracle().same_bits(a, b) for a, b in zip(first, second, strict=True))
            rows[system.name]["repeats"] = same
            del first, second
            runs[system.name] = partial(step, system)
        except Exception as error:
            rows[system.name]["error"] = harness.one_line(error)
            harness.check_gpu()
    if runs:
        times, errors = harness.interleaved(runs, clock, rounds, f"{cell.model.name}, {cell.seqlen}")
        for name, ms in times.items():
            rows[name] |= {"ms": statistics.median(ms), "round_ms": [round(t, 4) for t in ms]}
        for name, error in errors.items():
            rows[name]["error"] = error
    return with_auto(rows, alias)


def describe(cell: BlockCell) -> Row:
    """The columns that say which block a row is of."""
    return {
        "cell": f"{cell.seqlen} tokens",
        "model": cell.model.name,
        "causal": cell.model.causal,
        "seqlen": cell.seqlen,
    }


def show(row: Row) -> str:
    """A row as a line."""
    return f"{row['system']:<16}{row['ms']:>9.2f} ms  {'same bits' if row['repeats'] else 'other bits'}"


def main(argv: Sequence[str]) -> int:
    """Measures everything asked for, prints it, and writes it."""
    parser = harness.parser("blocks", __doc__)
    add_arguments(parser, OURS)
    parser.add_argument("--rounds", type=int, default=clocks.ROUNDS)
    options = parser.parse_args(argv)
    if options.quick and options.schedules == list(OURS):
        options.schedules = ["naive", AUTO, UNORDERED]
    return harness.run(
        "blocks",
        options,
        QUICK if options.quick else FULL,
        partial(measure_cell, systems=chosen(options), rounds=options.rounds),
        lambda rows: [tables.blocks(rows)],
        describe=describe,
        show=show,
        settings={"rounds": options.rounds, "sizes": {m.name: sizes(m) for m in MODELS}},
    )


def sizes(model: Model) -> str:
    """A model's sizes and their source, as one line."""
    experts = f", {model.experts} experts of which 2" if model.experts > 1 else ""
    text = f", {model.extra} text tokens more" if model.extra else ""
    return (
        f"hidden {model.hidden}, {model.heads} query and {model.kv_heads} KV heads of {model.head_dim}, "
        f"perceptron {model.mlp}{experts}{text} ({model.source})"
    )
