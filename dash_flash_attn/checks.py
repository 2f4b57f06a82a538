"""What the public functions refuse, and how they say it: every message starts with the argument's name."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .schedule import SCHEDULES, schedule_name

CUDA_HEAD_DIMS = (64, 128)
CUDA_MAX_BATCH = CUDA_MAX_HEADS = 65535  # two dimensions of a launch
CUDA_DTYPES = (torch.bfloat16, torch.float16)
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_LARGEST_SCALE = torch.finfo(torch.float32).max / 2
CPU_DTYPES = (*CUDA_DTYPES, torch.float32, torch.float64)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses what the operators cannot compute, before anything is launched.

    Raises:
        TypeError: a dtype that the device does not have here, or dtypes that differ.
        ValueError: shapes or devices that do not fit together.
        NotImplementedError: a head dimension without a kernel, more heads or entries than a launch has, a
            device that is neither CPU nor CUDA.
    """
    # Each attribute is read once: a read makes a new object, and this runs in both passes of every call.
    dtype, device = q.dtype, q.device
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    for name, x, shape in (("q", q, q_shape), ("k", k, k_shape), ("v", v, v_shape)):
        if len(shape) != 4:
            raise ValueError(f"{name}: expected (batch, seqlen, heads, head_dim), got {_shape(x)}")
        if x.dtype != dtype:
            raise TypeError(f"{name}: expected q's dtype {dtype}, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name}: expected q's device {device}, got {x.device}")
        if x.layout is not torch.strided:
            raise TypeError(f"{name}: expected a dense tensor, got the layout {x.layout}")
        if shape[0] != q_shape[0] or shape[3] != q_shape[3]:
            raise ValueError(f"{name}: expected q's batch and head_dim, {_shape(q)}, got {_shape(x)}")
    if v_shape != k_shape:
        raise ValueError(f"v: expected k's shape {_shape(k)}, got {_shape(v)}")
    batch, _, heads_q, head_dim = q_shape
    heads_k = k_shape[2]
    if heads_k == 0 or heads_q % heads_k:
        raise ValueError(f"k: its {heads_k} heads must divide q's {heads_q}")
    if head_dim == 0:
        raise ValueError("q: head_dim must not be 0")
    kind = device.type
    if kind == "cuda":
        if dtype not in CUDA_DTYPES:
            raise TypeError(f"q: on CUDA the dtype must be bfloat16 or float16, got {dtype}")
        if head_dim not in CUDA_HEAD_DIMS:
            raise NotImplementedError(f"q: on CUDA head_dim must be 64 or 128, got {head_dim}")
        if batch > CUDA_MAX_BATCH or heads_q > CUDA_MAX_HEADS:
            raise NotImplementedError(
                f"q: on CUDA batch and heads must be at most {CUDA_MAX_BATCH}, got {_shape(q)}"
            )
    elif kind not in ("cpu", "meta"):
        raise NotImplementedError(f"q: expected a tensor on CUDA or CPU, got {device}")
    elif dtype not in CPU_DTYPES:
        raise TypeError(f"q: the dtype must be a 16, 32 or 64 bit floating point type, got {dtype}")


def check_gradient_tensors(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """Refuses inputs of the backward that are not those of one forward: ValueError, TypeError.

    Kernels would read beyond them.
    """
    shape, dtype, device = q.shape, q.dtype, q.device
    for name, x in (("dout", dout), ("out", out)):
        if x.shape != shape:
            raise ValueError(f"{name}: expected q's shape {_shape(q)}, got {_shape(x)}")
        if x.dtype != dtype:
            raise TypeError(f"{name}: expected q's dtype {dtype}, got {x.dtype}")
    for name, x in (("dout", dout), ("out", out), ("lse", lse)):
        if x.device != device:
            raise ValueError(f"{name}: expected q's device {device}, got {x.device}")
    if lse.shape != (shape[0], shape[2], shape[1]):
        raise ValueError(f"lse: expected (batch, heads, seqlen) of q {_shape(q)}, got {_shape(lse)}")
    if lse.dtype != lse_dtype(q):
        raise TypeError(f"lse: expected {lse_dtype(q)}, got {lse.dtype}")
    check_tensors(q, k, v)


def lse_dtype(q: Tensor) -> torch.dtype:
    """The dtype of a log-sum-exp: that of the accumulators."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def check_is_tensor(name: str, x: object) -> None:
    """TypeError for what is none."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {x!r:.100}")


def check_call(q: Tensor, k: Tensor, v: Tensor, causal: bool, deterministic: bool) -> None:
    """Refuses arguments of another type: TypeError."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_is_tensor(name, x)
    # Or a caller of flash_attn 2, who passes the scale in the position of causal, would get a mask.
    for name, value in (("causal", causal), ("deterministic", deterministic)):
        if value not in (True, False):
            raise TypeError(f"{name}: expected True or False, got {value!r}")


def check_heads_q(num_heads_q: int | None) -> None:
    """TypeError for what is no number of heads."""
    if num_heads_q is not None and not isinstance(num_heads_q, int):
        raise TypeError(f"num_heads_q: expected a number of heads, got {num_heads_q!r}")


def check_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The factor on the scores: 1 / sqrt(head_dim) for None.

    TypeError for what is no number. ValueError unless positive and finite, as a float32 and with room for the
    kernels' factor log2(e).
    """
    if softmax_scale is None:
        return max(head_dim, 1) ** -0.5
    if not hasattr(softmax_scale, "__float__"):
        raise TypeError(f"softmax_scale: expected a number, got {softmax_scale!r}")
    # Zero is refused as well: it is what a caller of flash_attn 2 passes as dropout_p in this position.
    if not _SMALLEST_SCALE <= softmax_scale <= _LARGEST_SCALE:
        raise ValueError(
            f"softmax_scale: must be in [{_SMALLEST_SCALE:.3g}, {_LARGEST_SCALE:.3g}], got {softmax_scale}"
        )
    return float(softmax_scale)


def check_schedule(schedule: str | None, deterministic_schedule: str | None) -> str:
    """The schedule's name as the operators take it, "auto" for None.

    Raises:
        TypeError: a name that is not a string.
        ValueError: an unknown name, or two names that differ.
    """
    names = {_name(argument) for argument in (schedule, deterministic_schedule) if argument is not None}
    if len(names) > 1:
        raise ValueError(
            "deterministic_schedule: another name for the argument schedule, but they differ: "
            f"{deterministic_schedule!r} and {schedule!r}"
        )
    return names.pop() if names else "auto"


def _name(schedule: str) -> str:
    if not isinstance(schedule, str):
        raise TypeError(f"schedule: expected a name, got {schedule!r}")
    if schedule.lower() == "auto":
        return "auto"
    try:
        return schedule_name(schedule)
    except ValueError:
        raise ValueError(f"schedule: {schedule!r} is none of auto, {', '.join(SCHEDULES)}") from None


def check_features(
    *,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    dropout_p: float = 0.0,
    sm_margin: int = 0,
) -> None:
    """Refuses FlashAttention's options that this package does not have, and senseless values.

    Raises:
        NotImplementedError: an option that would change the result or is not offered.
        TypeError, ValueError: an sm_margin that is no number, or negative.
    """
    if qv is not None:
        raise NotImplementedError("qv: not supported, pass None")
    for name, value in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        if value is not None:
            raise NotImplementedError(f"{name}: there are no 8-bit kernels, pass None")
    if not isinstance(window_size, Sequence) or any(side not in (-1, None) for side in window_size):
        raise NotImplementedError(f"window_size: only (-1, -1), no window, got {window_size!r}")
    if attention_chunk != 0:
        raise NotImplementedError(f"attention_chunk: only 0, no chunks, got {attention_chunk}")
    if softcap != 0.0:
        raise NotImplementedError(f"softcap: only 0.0, no cap, got {softcap}")
    if num_splits not in (0, 1):
        raise NotImplementedError(f"num_splits: the keys of a row are never split, pass 1, got {num_splits}")
    if pack_gqa:
        raise NotImplementedError("pack_gqa: query heads are never packed, pass None")
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p: only 0.0, no dropout, got {dropout_p}")
    if not isinstance(sm_margin, int):
        raise TypeError(f"sm_margin: expected a number of SMs, got {sm_margin!r}")
    if sm_margin < 0:
        raise ValueError(f"sm_margin: the number of SMs to leave free, 0 or more, got {sm_margin}")


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
