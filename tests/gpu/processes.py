"""Tests that need a process of their own: its GPU context does not survive, or must not be the tests'."""

import subprocess
import sys
import textwrap
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SETUP = f"""
import sys
sys.path[:0] = {[str(folder) for folder in (TESTS, TESTS.parent, TESTS.parent.parent)]!r}
import torch
from cases import SCHEDULES, Case, backward, forward
from dash_flash_attn import _native, kernels, ops
from dash_flash_attn.layout import matrix
from dash_flash_attn.schedule import Schedule

def prepared(head_dim, heads=4, kv_heads=2):
    case = Case(300, 300, heads, kv_heads, head_dim, torch.bfloat16, True, batch=1)
    q, k, v, dout = case.inputs()
    return case, (dout, q, k, v, *forward(case, q, k, v))
"""


def run_python(*parts: str, seconds: int, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """Runs SETUP and then all parts in another Python, under the command `before`."""
    command = [*before, sys.executable, "-c", SETUP + "".join(map(textwrap.dedent, parts))]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds)
