"""What goes wrong on purpose, or would only be seen by a checker: each in a process of its own."""

import re
import shutil

import pytest
from processes import run_python

from dash_flash_attn.schedule import Schedule

# A call whose workspace is in the test's hands: words[kind] are its counters, and nobody clears them.
CALL = """
case, (dout, q, k, v, out, lse) = prepared(128, 16, 1)
expected = backward(case, (dout, q, k, v, out, lse), "shift")
gradients = [torch.zeros_like(x) for x in (q, k, v)]
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
words = dict(zip(sizes, words))

def launch(stream):
    _native.backward(
        *map(matrix, (q, k, v, out, dout, *gradients)), lse.data_ptr(), 0, workspace.data_ptr(), shape,
        case.scale, True, "bf16", "shift", True, 0, 0, 200_000_000, stream.cuda_stream, prepare=False,
    )
"""


@pytest.mark.parametrize("waits_at", ["query", "KV", "statistics"])
def test_a_turn_that_never_comes_ends_in_an_error(waits_at: str) -> None:
    """Counters of one kind hold garbage: the kernel must say where it waits, and end.

    Many CTAs give up at the same time. What is said must be of one of them.
    """
    body = f"""
    words[{waits_at!r}].fill_(-1)
    launch(torch.cuda.current_stream())
    torch.cuda.synchronize()
    """
    result = run_python(CALL, body, seconds=120)
    assert result.returncode != 0
    assert "CUDA error" in result.stderr
    assert result.stderr.count("a wait without end") == 1
    if waits_at == "statistics":
        message = r"KV tile (\d) waits for the row statistics of head (\d+), .* for (\d+) of 5 query tiles"
        assert re.search(message, result.stderr), result.stderr[-2000:]
        return
    place = rf"{waits_at} tile (\d) of head (\d+), batch entry 0"
    message = rf"KV tile (\d) waits for its turn (\d) at {place}, whose ticket stands at (\d+)"
    found = re.search(message, result.stderr)
    assert found, result.stderr[-2000:]
    kv_tile, turn, tile, head, ticket = map(int, found.groups())
    if waits_at == "KV":
        assert (tile, turn, head) == (kv_tile, 1, 0)  # the second part, of the only KV head
    else:
        policy = Schedule("shift", 300, 300, 128, True).policy
        assert turn == policy.rank(kv_tile, tile, head % policy.ways) > 0
    assert ticket in (2**32 - 1, 0), "who comes first adds one without waiting"


def test_progress_elsewhere_prolongs_a_wait() -> None:
    """A turn comes after many times the limit, in which another counter moves: nobody gives up."""
    body = """
    import time
    ticket = words["query"][grid.q_tiles() - 1 :][:1]
    other = words["claims"][:1]  # counts CTAs on a side of the L2 cache, and this call has one side
    for counter in (ticket, other):  # loads what a later launch would have to load beside the kernel
        counter.add_(1000).sub_(1000).add_(1)
    ticket.add_(999)
    torch.cuda.synchronize()
    ours, beside = torch.cuda.Stream(), torch.cuda.Stream()
    launch(ours)
    with torch.cuda.stream(beside):
        for _ in range(200):
            other.add_(1)
            beside.synchronize()
            time.sleep(0.01)
        assert not ours.query(), "nobody waited"
        ticket.sub_(1000)
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(gradients, expected))
    assert _native.stuck_report() is None
    print("came through")
    """
    result = run_python(CALL, body, seconds=120)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "came through" in result.stdout


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
    result = run_python(body, before=command, seconds=240)
    if "Device not supported" in result.stdout:
        pytest.skip("compute-sanitizer does not support this device")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "all kernels ran" in result.stdout
    assert "ERROR SUMMARY: 0 errors" in result.stdout or "RACECHECK SUMMARY: 0 hazards" in result.stdout
