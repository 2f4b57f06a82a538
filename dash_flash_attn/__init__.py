"""Deterministic attention for training: a backward pass that gives the same bits on every run."""

from ._version import __version__
from .interface import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func

__all__ = ["__version__", "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"]
