"""What the public functions refuse, and how they say it: every message starts with the argument's name."""

import numbers
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .dispatch import is_constant
from .schedule import SCHEDULES, schedule_name

UNORDERED = "unordered"
"""The control: the visits of "auto", with dQ summed in the order of arrival."""

CUDA_HEAD_DIMS = (64, 128)
CUDA_MAX_BATCH = CUDA_MAX_HEADS = 65535  # two dimensions of a launch
CUDA_DTYPES = (torch.bfloat16, torch.float16)
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_LARGEST_SCALE = torch.finfo(torch.float32).max / 2
_NO_WINDOW = (-1, -1)
# As tuples: older compilers know no unions of types.
_FLAGS = (bool, np.bool_)
_INTEGERS = (int, np.integer, torch.SymInt)
_NUMBERS = (numbers.Real, torch.SymInt, torch.SymFloat)
CPU_DTYPES = (*CUDA_DTYPES, torch.float32, torch.float64)
# flash_attn 2 has dropout_p in the position of softmax_scale, and that in the position of causal.
_POSITIONS = (
    "the positions are FlashAttention-3's, (q, k, v, softmax_scale, causal, ...), and dropout_p is a keyword"
)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses what the operators cannot compute, before anything is launched.

    Raises:
        TypeError: a dtype that the device does not have here, or dtypes that differ.
        ValueError: shapes or devices that do not fit together.
        NotImplementedError: a head dimension without a kernel, more heads or entries than a launch has, a
            device that is neither CPU nor CUDA.

    Tensors on meta are refused as on CUDA, so that a dry run tells what a GPU will say.
    """
    # Each attribute is read once: a read makes a new object, and this runs in both passes of every call.
    dtype, device = q.dtype, q.device
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    for name, x, shape in (("q", q, q_shape), ("k", k, k_shape), ("v", v, v_shape)):
        if len(shape) != 4:
            raise _no_four_dimensions(name, x)
        if x.dtype != dtype:
            raise TypeError(f"{name}: expected q's dtype {dtype}, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name}: expected q's device {device}, got {x.device}")
        if x.layout is not torch.strided:
            raise _not_dense(name, x)
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
    if kind in ("cuda", "meta"):
        where = "on CUDA" if kind == "cuda" else "on meta, as on CUDA,"
        if dtype not in CUDA_DTYPES:
            raise TypeError(f"q: {where} the dtype must be bfloat16 or float16, got {dtype}")
        if head_dim not in CUDA_HEAD_DIMS:
            raise NotImplementedError(f"q: {where} head_dim must be 64 or 128, got {head_dim}")
        if batch > CUDA_MAX_BATCH or heads_q > CUDA_MAX_HEADS:
            raise NotImplementedError(
                f"q: {where} batch and heads must be at most {CUDA_MAX_BATCH}, got {_shape(q)}"
            )
    elif kind != "cpu":
        raise NotImplementedError(f"q: expected a tensor on CUDA or CPU, got {device}")
    elif dtype not in CPU_DTYPES:
        raise TypeError(f"q: the dtype must be a 16, 32 or 64 bit floating point type, got {dtype}")


def check_gradient_tensors(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None = None
) -> None:
    """Refuses inputs of the backward that are not those of one forward: ValueError, TypeError.

    Kernels would read beyond them.
    """
    shape, dtype, device = q.shape, q.dtype, q.device
    for name, x in (("dout", dout), ("out", out)):
        if x.shape != shape:
            raise ValueError(f"{name}: expected q's shape {_shape(q)}, got {_shape(x)}")
        if x.dtype != dtype:
            raise TypeError(f"{name}: expected q's dtype {dtype}, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name}: expected q's device {device}, got {x.device}")
    check_statistics("lse", lse, q)
    if dlse is not None:
        check_statistics("dlse", dlse, q)
    check_tensors(q, k, v)


def check_statistics(name: str, x: Tensor, q: Tensor) -> None:
    """Refuses what is no number for each query and head: ValueError, TypeError."""
    shape = q.shape
    if x.device != q.device:
        raise ValueError(f"{name}: expected q's device {q.device}, got {x.device}")
    if x.shape != (shape[0], shape[2], shape[1]):
        raise ValueError(f"{name}: expected (batch, heads, seqlen) of q {_shape(q)}, got {_shape(x)}")
    if x.dtype != lse_dtype(q):
        raise TypeError(f"{name}: expected {lse_dtype(q)}, got {x.dtype}")


def check_rounded(q: Tensor, rounded: bool) -> None:
    """NotImplementedError for sums that are not rounded, but on the CPU."""
    if not rounded and q.device.type != "cpu":
        raise NotImplementedError(f"rounded: only True on CUDA, gradients in {q.dtype}")


def check_place(name: str, x: Tensor, like: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Refuses what a result in the shape of `like` cannot be written into: ValueError, TypeError.

    NotImplementedError for any but the first of the dtypes, unless on the CPU.
    """
    if x.shape != like.shape:
        raise ValueError(f"{name}: expected the shape {_shape(like)}, got {_shape(x)}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(map(str, dict.fromkeys(dtypes)))}, got {x.dtype}")
    if x.device != like.device:
        raise ValueError(f"{name}: expected q's device {like.device}, got {x.device}")
    if x.dtype != dtypes[0] and like.device.type != "cpu":
        raise NotImplementedError(f"{name}: on CUDA only {dtypes[0]}, got {x.dtype}")
    # A compiler that traces an autograd function's backward knows no strides: torch's copy refuses there.
    if torch.compiler.is_compiling():
        return
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        raise ValueError(f"{name}: several of its elements share memory, by the strides {x.stride()}")


def lse_dtype(q: Tensor) -> torch.dtype:
    """The dtype of a log-sum-exp: that of the accumulators."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def check_dense(name: str, x: object) -> None:
    """TypeError for what is no dense tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {x!r:.100}")
    # A compiler that traces the backward of an autograd function knows no layouts: the operator will see.
    if not torch.compiler.is_compiling() and x.layout is not torch.strided:
        raise _not_dense(name, x)


def check_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    """TypeError for what is no dense tensor, ValueError for one that has not four dimensions."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dense(name, x)
        if x.dim() != 4:
            raise _no_four_dimensions(name, x)


def check_flag(name: str, value: bool, hint: str = "") -> bool:
    """TypeError for what is neither True nor False."""
    # Numbers too: a caller of flash_attn 2, who passes the scale in the position of causal, would get a mask.
    if not isinstance(value, _FLAGS):
        raise TypeError(f"{name}: expected True or False, got {_described(value)}{hint}")
    return True if value else False  # noqa: SIM210 - older compilers know no bool() of a symbol


def check_causal(causal: bool) -> bool:
    """TypeError for what is neither True nor False."""
    return check_flag("causal", causal, f"; {_POSITIONS}")


def check_heads_q(num_heads_q: int | None) -> None:
    """TypeError for what is no number of heads."""
    if num_heads_q is not None and not _is_integer(num_heads_q):
        raise TypeError(f"num_heads_q: expected a number of heads, got {_described(num_heads_q)}")


def check_scale(softmax_scale: float) -> float:
    """The factor on the scores.

    TypeError for what is no number; a tensor's gradient would be lost. ValueError unless it is finite and not
    0, as a float32 and with room for the kernels' factor log2(e).
    """
    if isinstance(softmax_scale, Tensor):
        raise TypeError(
            "softmax_scale: expected a number, got a tensor, which would get no gradient: multiply q by it, "
            "and pass softmax_scale=1.0"
        )
    if not _is_number(softmax_scale):
        raise TypeError(f"softmax_scale: expected a number, got {_described(softmax_scale)}")
    if torch.compiler.is_compiling() and not is_constant(softmax_scale):
        return softmax_scale  # the operator will see
    if not _SMALLEST_SCALE <= abs(softmax_scale) <= _LARGEST_SCALE:
        # Zero: what a caller of flash_attn 2 passes as dropout_p in this position.
        hint = f"; {_POSITIONS}" if softmax_scale == 0 else ""
        raise ValueError(
            f"softmax_scale: its absolute value must be in [{_SMALLEST_SCALE:.3g}, {_LARGEST_SCALE:.3g}], "
            f"got {softmax_scale}{hint}"
        )
    return float(softmax_scale)


def scale_for(q: Tensor, softmax_scale: float | None) -> float:
    """The caller's factor on the scores, checked, or 1 / sqrt(head_dim)."""
    # A head_dim of 0 is refused by the operator.
    return max(q.shape[-1], 1) ** -0.5 if softmax_scale is None else check_scale(softmax_scale)


def check_window(
    window_size: Sequence[int | None],
    causal: bool,
    seqlen_q: int,
    seqlen_k: int,
    name: str = "window_size",
) -> bool:
    """Whether the mask is causal, by both arguments.

    A window (left, right) lets query r see the keys from r + seqlen_k - seqlen_q - left to
    r + seqlen_k - seqlen_q + right; -1 or None is no limit. So a right side of 0 is the causal mask, and
    under that mask the right side does not matter.

    Raises:
        TypeError: no pair, or a side that is no number.
        ValueError: not two sides, or one below -1.
        NotImplementedError: a side that cuts off keys which the mask leaves.
    """
    if window_size == _NO_WINDOW:
        return causal
    if not isinstance(window_size, Sequence) or isinstance(window_size, str):
        raise TypeError(f"{name}: expected a pair (left, right), got {_described(window_size)}")
    if len(window_size) != 2:
        raise ValueError(f"{name}: expected a pair (left, right), got {window_size}")
    for side in window_size:
        if side is not None and not _is_integer(side):
            raise TypeError(f"{name}: expected numbers of keys or None, got {_described(window_size)}")
        if side is not None and side < -1:
            raise ValueError(f"{name}: each side is 0 or more, -1 or None, got {window_size}")
    left, right = window_size
    causal = causal or right == 0
    # From the first query to the last key, and from the last query to the first key.
    limits_right = right not in (None, -1) and not causal and right < seqlen_q - 1
    limits_left = left not in (None, -1) and left < seqlen_k - 1
    if limits_left or limits_right:
        raise NotImplementedError(
            f"{name}: {window_size} cuts off keys, and there are no kernels for that; a side of -1 or "
            "None is no limit, and (-1, 0) is the causal mask"
        )
    return causal


def check_schedule(schedule: str | None, deterministic_schedule: str | None, deterministic: bool) -> str:
    """The schedule's name as the operators take it, "auto" for None.

    Raises:
        TypeError: a name that is not a string, a `deterministic` that is not True or False.
        ValueError: an unknown name, two names that differ, or "unordered" together with deterministic=True.
        RuntimeError: "unordered" in torch's deterministic mode.
    """
    names = {check_name(argument) for argument in (schedule, deterministic_schedule) if argument is not None}
    if len(names) > 1:
        raise ValueError(
            "deterministic_schedule: another name for the argument schedule, but they differ: "
            f"{deterministic_schedule!r} and {schedule!r}"
        )
    name = names.pop() if names else "auto"
    if check_flag("deterministic", deterministic) and name == UNORDERED:
        raise ValueError("schedule: 'unordered' sums in the order of arrival, but deterministic=True")
    alert_unordered(name)
    return name


def alert_unordered(schedule: str) -> None:
    """What torch does about operators that are not deterministic, for the schedule "unordered".

    RuntimeError under torch.use_deterministic_algorithms(True), a warning if that has warn_only=True.
    """
    if schedule != UNORDERED or not torch.are_deterministic_algorithms_enabled():
        return
    message = (
        "schedule: the backward with 'unordered' is not deterministic, but "
        "torch.use_deterministic_algorithms(True) is set. Any other schedule is deterministic."
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=4)


def check_name(schedule: str) -> str:
    """A schedule's name in the spelling of SCHEDULES, or "auto" or "unordered": TypeError, ValueError."""
    if not isinstance(schedule, str):
        raise TypeError(f"schedule: expected a name, got {schedule!r}")
    if schedule.lower() in ("auto", UNORDERED):
        return schedule.lower()
    try:
        return schedule_name(schedule)
    except ValueError:
        names = ", ".join(("auto", *SCHEDULES, UNORDERED))
        raise ValueError(f"schedule: {schedule!r} is none of {names}") from None


def check_features(
    *,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int | None = 1,
    pack_gqa: bool | None = None,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sm_margin: int = 0,
) -> None:
    """Refuses FlashAttention's options that this package does not have, and senseless values.

    num_splits and pack_gqa say how FlashAttention-3 shall compute, not what: any sensible value will do.

    Raises:
        NotImplementedError: an option that would change the result.
        TypeError, ValueError: a number that is none, or negative where there is no such thing.
    """
    check_none("not supported", qv=qv, alibi_slopes=alibi_slopes)
    check_none("there are no 8-bit kernels", q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    _check_number("attention_chunk", attention_chunk)
    _check_number("softcap", softcap)
    _check_number("dropout_p", dropout_p)
    if attention_chunk != 0:
        raise NotImplementedError(f"attention_chunk: only 0, no chunks, got {attention_chunk}")
    if not softcap <= 0:  # a NaN is not
        raise NotImplementedError(f"softcap: only 0.0, no cap, got {softcap}")
    if dropout_p != 0:
        raise NotImplementedError(f"dropout_p: only 0.0, no dropout, got {dropout_p}")
    if pack_gqa is not None:
        check_flag("pack_gqa", pack_gqa)
    if num_splits is not None:
        check_count("num_splits", num_splits, "splits")
    check_count("sm_margin", sm_margin, "SMs")


def check_none(reason: str, **values: object) -> None:
    """NotImplementedError with the reason for the first value that is not None, by its name."""
    for name, value in values.items():
        if value is not None:
            raise NotImplementedError(f"{name}: {reason}, pass None")


def _check_number(name: str, value: object) -> None:
    if not _is_number(value):
        raise TypeError(f"{name}: expected a number, got {_described(value)}")


def check_count(name: str, value: object, what: str) -> None:
    """TypeError for what is no number of these, ValueError for a negative one."""
    if not _is_integer(value):
        raise TypeError(f"{name}: expected a number of {what}, got {_described(value)}")
    if value < 0:
        raise ValueError(f"{name}: expected a number of {what}, 0 or more, got {value}")


def _is_number(x: object) -> bool:
    # The first two are what callers pass: to ask an abstract class takes longer.
    return type(x) in (float, int) or (isinstance(x, _NUMBERS) and not isinstance(x, bool))


def _is_integer(x: object) -> bool:
    return type(x) is int or (isinstance(x, _INTEGERS) and not isinstance(x, bool))


def _described(x: object) -> str:
    return "a tensor" if isinstance(x, Tensor) else f"{x!r:.100}"


def _no_four_dimensions(name: str, x: Tensor) -> ValueError:
    return ValueError(f"{name}: expected (batch, seqlen, heads, head_dim), got {_shape(x)}")


def _not_dense(name: str, x: Tensor) -> TypeError:
    return TypeError(f"{name}: expected a dense tensor, got the layout {x.layout}")


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
