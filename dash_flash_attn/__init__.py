"""Deterministic attention for training: a backward pass that gives the same bits on every run."""

from ._version import __version__

try:
    from . import _native  # noqa: F401
except ImportError:
    from importlib.util import find_spec

    if find_spec("dash_flash_attn._native"):
        raise
    raise ImportError(
        f"dash_flash_attn: {__path__[0]} holds the package's source, but not its native module. Start Python "
        "in another folder to use an installed package, or build here: pip install -e ."
    ) from None
from .interface import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from .lower_level import _flash_attn_backward, _flash_attn_forward

__all__ = [
    "__version__",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
]
