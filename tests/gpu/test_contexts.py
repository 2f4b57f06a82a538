"""Part of a GPU: how many CTAs the kernels take to be resident, and what is refused there."""

import pytest
import torch
from processes import run_python

from dash_flash_attn import _native, kernels

# A green context of 8 SMs, the fewest that Hopper gives, by the driver's functions of CUDA 12.5.
GREEN = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
torch.zeros(1, device="cuda")  # makes the primary context

def ask(function, *arguments):
    status = getattr(cuda, function)(*arguments)
    assert status == 0, f"{function}: error {status}"

SM = 1  # the type of a resource
all_sms, some_sms, rest = (ctypes.create_string_buffer(1024) for _ in range(3))
descriptor, green, context, handle = (ctypes.c_void_p() for _ in range(4))
groups = ctypes.c_uint(1)
try:
    cuda.cuGreenCtxStreamCreate
except AttributeError:
    print("no green contexts")
    sys.exit()
ask("cuDeviceGetDevResource", 0, all_sms, SM)
ask("cuDevSmResourceSplitByCount", some_sms, ctypes.byref(groups), all_sms, rest, 0, 8)
ask("cuDevResourceGenerateDesc", ctypes.byref(descriptor), some_sms, 1)
ask("cuGreenCtxCreate", ctypes.byref(green), descriptor, 0, 1)
ask("cuCtxFromGreenCtx", ctypes.byref(context), green)
ask("cuGreenCtxStreamCreate", ctypes.byref(handle), green, 1, 0)
stream = torch.cuda.ExternalStream(handle.value)

case = Case(4096, 4096, 2, 2, 128, torch.bfloat16, False, batch=1)
q, k, v, dout = case.inputs()
tensors = dout, q, k, v, *forward(case, q, k, v)
expected = backward(case, tensors, "naive")
torch.cuda.synchronize()
assert Schedule("shift", 4096, 4096, 128, False).resident_ctas_needed > 8

def check():
    results = backward(case, tensors, "naive")
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(results, expected))
    try:
        backward(case, tensors, "shift")
    except RuntimeError as error:
        assert "the stream has 8 after sm_margin" in str(error), error
    else:
        raise AssertionError("a cycle that cannot be resident was launched")
"""


def run(body: str) -> None:
    """Runs GREEN and `body` in a process of its own."""
    result = run_python(GREEN, body, "print('all of it')", seconds=120)
    if "no green contexts" in result.stdout:
        pytest.skip("the driver has no green contexts")
    assert result.returncode == 0, result.stderr[-2000:]
    assert "all of it" in result.stdout


def test_a_stream_of_a_green_context() -> None:
    run("""
    assert _native.resident_ctas(0, 0, stream.cuda_stream) == 8
    assert _native.resident_ctas(0, 3, stream.cuda_stream) == 5
    assert _native.resident_ctas(0) > 8, "the context of the default stream has them all"
    with torch.cuda.stream(stream):
        check()
    """)


def test_a_green_context_that_is_current_stays_current() -> None:
    run("""
    ask("cuCtxPushCurrent_v2", context)
    assert _native.resident_ctas(0) == 8
    check()
    current = ctypes.c_void_p()
    ask("cuCtxGetCurrent", ctypes.byref(current))
    assert current.value == context.value
    ask("cuCtxPopCurrent_v2", ctypes.byref(current))
    assert _native.resident_ctas(0) > 8
    """)


def test_a_whole_gpu() -> None:
    assert kernels.not_loaded() is None
    sms = torch.cuda.get_device_properties().multi_processor_count
    stream = torch.cuda.Stream()
    for handle in (0, stream.cuda_stream):
        assert _native.resident_ctas(0, 0, handle) == sms
        assert _native.resident_ctas(0, sms - 1, handle) == 1
    with pytest.raises(RuntimeError, match=r"sm_margin: .* the stream can use"):
        _native.resident_ctas(0, sms)
    with pytest.raises(RuntimeError, match="device"):
        _native.resident_ctas(torch.cuda.device_count())


def test_the_current_device_is_left_alone() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    assert torch.cuda.current_device() == 0
    assert _native.resident_ctas(1) > 0
    assert torch.cuda.current_device() == 0
