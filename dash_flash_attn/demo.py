"""`python -m dash_flash_attn demo`: trains a small language model twice, and compares the bits.

The text is what CPython's help() shows (pydoc_data.topics), read byte by byte. Every part of the model but
the attention is reproducible anyway, so that a difference between the two runs comes from the attention.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from .interface import flash_attn_func
from .schedule import SCHEDULES, schedule_name

BYTES = 256
SEED = 0
WARM_UP_STEPS = 5  # not in the tokens a second
LAST_STEPS = 10  # whose losses are averaged: one batch's is off by 0.1
DEFAULT_ATTENTION = "torch's default attention"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (batch, seqlen, heads, head_dim) -> out


@dataclass(frozen=True)
class Sizes:
    """The model and a step's tokens; long enough that a query's gradient is a sum over several KV tiles."""

    layers: int
    heads: int
    head_dim: int
    batch: int
    seqlen: int
    steps: int

    @property
    def width(self) -> int:
        """Numbers a token."""
        return self.heads * self.head_dim


ON_CPU = Sizes(layers=2, heads=2, head_dim=64, batch=2, seqlen=512, steps=40)
ON_GPU = Sizes(layers=4, heads=8, head_dim=128, batch=4, seqlen=4096, steps=50)


class Block(nn.Module):
    """One transformer layer: attention and a perceptron, each beside a residual path."""

    def __init__(self, sizes: Sizes, attention: Attention) -> None:
        """`attention` is called with three tensors (batch, seqlen, heads, head_dim)."""
        super().__init__()
        self.sizes, self.attention = sizes, attention
        self.norm1, self.norm2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.project = nn.Linear(sizes.width, sizes.width)
        self.up = nn.Linear(sizes.width, 4 * sizes.width)
        self.down = nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, width) to the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.sizes.heads, -1)).unbind(2)
        x = x + self.project(self.attention(q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Predicts the next byte from those before it."""

    def __init__(self, sizes: Sizes, attention: Attention) -> None:
        """`attention` must be causal."""
        super().__init__()
        self.embedding = nn.Linear(BYTES, sizes.width, bias=False)
        self.position = nn.Parameter(0.02 * torch.randn(sizes.seqlen, sizes.width))
        self.blocks = nn.Sequential(*(Block(sizes, attention) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, BYTES)

    def forward(self, text: Tensor) -> Tensor:
        """(batch, seqlen) bytes as integers to (batch, seqlen, 256) logits."""
        # A product instead of a look-up: the gradient of a look-up is summed with atomic additions on a GPU.
        one_hot = (text.unsqueeze(-1) == torch.arange(BYTES, device=text.device)).float()
        return self.head(self.norm(self.blocks(self.embedding(one_hot) + self.position)))


@dataclass
class Run:
    """What is left of a training run, all on its device."""

    losses: Tensor  # float32 (steps,)
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]  # of the last step
    tokens_per_second: float


def scheduled(schedule: str) -> Attention:
    """This package's attention."""
    return lambda q, k, v: flash_attn_func(q, k, v, causal=True, deterministic=True, schedule=schedule)


def default_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Whatever torch chooses for a causal mask."""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


def documentation() -> Tensor:
    """The text, as integers."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def train(attention: Attention, sizes: Sizes, device: torch.device, label: str) -> Run:
    """Trains from SEED, with a progress bar on the standard error."""
    torch.manual_seed(SEED)
    model = Model(sizes, attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3 if device.type == "cpu" else 3e-4)
    text = documentation().to(device)
    choice = torch.Generator().manual_seed(SEED)
    losses = []
    warm_up = min(WARM_UP_STEPS, sizes.steps - 1)
    # disable=None: no bar where nobody looks, in a log file.
    steps = tqdm(range(sizes.steps), desc=label, file=sys.stderr, leave=False, disable=None)
    for step in steps:
        if step == warm_up:
            start = _now(device)
        begins = torch.randint(len(text) - sizes.seqlen, (sizes.batch,), generator=choice).tolist()
        sample = torch.stack([text[begin : begin + sizes.seqlen + 1] for begin in begins])
        # 16-bit products on a GPU, and float32 on the CPU.
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(sample[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), sample[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        steps.set_postfix(loss=f"{loss.item():.3f}")
    seconds = _now(device) - start
    parameters = dict(model.named_parameters())
    return Run(
        losses=torch.stack(losses),
        weights={name: p.detach() for name, p in parameters.items()},
        gradients={name: p.grad for name, p in parameters.items()},
        tokens_per_second=(sizes.steps - warm_up) * sizes.batch * sizes.seqlen / seconds,
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def differing(x: Tensor, y: Tensor) -> int:
    """How many float32 numbers of x and y differ in a bit."""
    return int((x.contiguous().view(torch.int32) != y.contiguous().view(torch.int32)).sum())


def compare(name: str, attention: Attention, sizes: Sizes, device: torch.device) -> dict:
    """Trains twice; how many numbers differ, and what the runs were like."""
    first, second = (train(attention, sizes, device, f"{name}, run {i}") for i in (1, 2))
    different = {
        "losses": differing(first.losses, second.losses),
        "weights": sum(differing(w, second.weights[key]) for key, w in first.weights.items()),
        "gradients": sum(differing(g, second.gradients[key]) for key, g in first.gradients.items()),
    }
    return {
        "attention": name,
        "bitwise_equal": not any(different.values()),
        "different": different,
        "first_loss": first.losses[0].item(),
        "last_loss": first.losses[-1].item(),
        "mean_last_loss": first.losses[-LAST_STEPS:].mean().item(),
        "tokens_per_second": max(first.tokens_per_second, second.tokens_per_second),
    }


def demonstrate(schedules: list[str], sizes: Sizes, device: torch.device) -> Iterator[dict]:
    """The comparison for each schedule and, last, for torch's default attention."""
    for name in schedules:
        yield compare(name, scheduled(name), sizes, device)
    yield compare(DEFAULT_ATTENTION, default_attention, sizes, device)


def verdict(result: dict) -> str:
    """One line about one attention."""
    if result["bitwise_equal"]:
        equal = "bitwise equal"
    else:
        differ = ", ".join(f"{n:,} {what}" for what, n in result["different"].items() if n)
        equal = f"NOT EQUAL: {differ} differ"
    loss = f"loss {result['first_loss']:.3f} -> {result['mean_last_loss']:.3f}"
    return f"  {result['attention']:<26}{loss}{result['tokens_per_second']:>12,.0f} tokens/s  {equal}"


def introduction(sizes: Sizes, device: str) -> str:
    """What is about to be trained."""
    return (
        f"A causal transformer, {sizes.layers} layers of {sizes.heads} heads of {sizes.head_dim}, learns "
        f"Python's own documentation byte by byte\non {device}: {sizes.steps} steps of {sizes.batch} x "
        f"{sizes.seqlen} bytes, twice from the same seed for each attention.\nCompared: the losses of all "
        "steps, all weights, all gradients of the last step. Shown: the first step's loss, the mean of "
        f"the last {min(sizes.steps, LAST_STEPS)}."
    )


def chosen_device(name: str | None) -> torch.device:
    """The device of that name, or of none: a GPU where there is one. ValueError where it cannot be used."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return torch.device("cuda" if gpus else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise ValueError(f"cuda, cuda:N or cpu, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ValueError(f"torch sees no GPU {name!r}; it sees {gpus}")
    return device


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m dash_flash_attn demo",
        description="Trains a small language model twice from the same seed and compares the bits.",
    )
    parser.add_argument("--schedule", default="all", help=f"{', '.join(SCHEDULES)}, or all (the default)")
    parser.add_argument("--steps", type=int, help=f"training steps ({ON_CPU.steps}, on a GPU {ON_GPU.steps})")
    parser.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(argv)
    try:
        args.schedules = list(SCHEDULES) if args.schedule == "all" else [schedule_name(args.schedule)]
    except ValueError as error:
        parser.error(f"--schedule: {error}")
    try:
        args.device = chosen_device(args.device)
    except ValueError as error:
        parser.error(f"--device: {error}")
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps: at least 1, got {args.steps}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the demo. Returns 0 if every schedule gave the same bits twice, else 1."""
    args = arguments(argv)
    # cuBLAS wants it for reproducible products, before its first call.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = args.device
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    if args.steps is not None:
        sizes = replace(sizes, steps=args.steps)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    if not args.json:
        print(introduction(sizes, name), flush=True)
    rows = []
    for row in demonstrate(args.schedules, sizes, device):
        rows.append(row)
        if not args.json:
            print(verdict(row), flush=True)
    equal = all(row["bitwise_equal"] for row in rows[:-1])
    if args.json:
        result = {"device": name, "sizes": asdict(sizes), "schedules": rows[:-1], "contrast": rows[-1]}
        print(json.dumps(result, indent=1))
    else:
        print("Two runs, the same bits: every schedule." if equal else "A schedule did not repeat its bits.")
    return 0 if equal else 1
