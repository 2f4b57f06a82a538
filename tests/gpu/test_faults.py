"""What goes wrong on purpose, or would only be seen by a checker: each in a process of its own."""

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
SETUP = f"""
import sys
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent.parent)!r}]
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


def run_python(body: str, *before: str, seconds: int) -> subprocess.CompletedProcess:
    """Runs SETUP and `body` in another Python, under the command `before`."""
    command = [*before, sys.executable, "-c", SETUP + textwrap.dedent(body)]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds)


@pytest.mark.parametrize("waits_at", ["query", "KV", "statistics"])
def test_a_turn_that_never_comes_ends_in_an_error(waits_at: str) -> None:
    """Counters of one kind hold garbage, nobody clears them: the kernel must say where it waits, and end."""
    body = f"""
    case, (dout, q, k, v, out, lse) = prepared(128, 16, 1)
    kernels.not_loaded()
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    shape = (1, 300, 300, 16, 1, 128)
    workspace = torch.zeros(_native.workspace_bytes(*shape, True, "shift"), dtype=torch.uint8, device="cuda")
    # It begins at a multiple of 64 KB, and ends with a word for each query tile and head, four for each KV
    # tile and KV head, seven of claims and one for each head.
    begin = -workspace.data_ptr() % 65536
    workspace = workspace[begin : begin + workspace.numel() - 65536 + 256]
    grid = Schedule("shift", 300, 300, 128, True).grid
    assert _native.part_sizes(16, 1, grid, 128, False) == [8, 8]  # or KV tiles would wait for nobody
    sizes = dict(query=16 * grid.q_tiles(), KV=4 * grid.kv_tiles(), claims=7, statistics=16)
    words = workspace.view(torch.int32)[-sum(sizes.values()) :].split(list(sizes.values()))
    words[list(sizes).index({waits_at!r})].fill_(-1)
    _native.backward(
        *map(matrix, (q, k, v, out, dout, dq, dk, dv)), lse.data_ptr(), 0, workspace.data_ptr(), shape,
        case.scale, True, "bf16", "shift", True, 0, 0, 200_000_000,
        torch.cuda.current_stream().cuda_stream, prepare=False,
    )
    torch.cuda.synchronize()
    """
    result = run_python(body, seconds=120)
    assert result.returncode != 0
    assert "CUDA error" in result.stderr
    message = rf"KV tile \d waits .* {waits_at}( tile \d)? of head \d"
    assert re.search(message, result.stderr), result.stderr[-2000:]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    body = """
    ops.WAIT_LIMIT_NS *= 10  # a checked kernel is slow
    few = torch.cuda.get_device_properties().multi_processor_count - 3
    for head_dim in (64, 128):
        case, tensors = prepared(head_dim)
        for schedule in SCHEDULES:
            backward(case, tensors, schedule)
            backward(case, tensors, schedule, sm_margin=few)  # several chains on each of three CTAs
        # Chains enough for both sides of the L2 cache.
        both = Case(300, 300, 64, 64, head_dim, torch.bfloat16, True, batch=2)
        q, k, v, dout = both.inputs()
        backward(both, (dout, q, k, v, *forward(both, q, k, v)), "shift")
        # Parts of a group, and query tiles to which one KV tile contributes.
        one = Case(100, 100, 64, 1, head_dim, torch.bfloat16, False, batch=1)
        q, k, v, dout = one.inputs()
        backward(one, (dout, q, k, v, *forward(one, q, k, v)), "shift", sm_margin=few)
    torch.cuda.synchronize()
    print("all kernels ran")
    """
    # Only our kernels: torch's are not the subject, and checking them takes minutes.
    command = (sanitizer, "--tool", tool, "--error-exitcode", "9", "--kernel-regex", "kns=dash")
    result = run_python(body, *command, seconds=240)
    if "Device not supported" in result.stdout:
        pytest.skip("compute-sanitizer does not support this device")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "all kernels ran" in result.stdout
    assert "ERROR SUMMARY: 0 errors" in result.stdout or "RACECHECK SUMMARY: 0 hazards" in result.stdout
