"""What torch's dispatcher would do with a call of an operator, for calls that go past it."""

import torch
from torch import Tensor
from torch.fx.experimental import symbolic_shapes

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_dispatch_keys = torch._C._dispatch_keys


def _keys(*names: str) -> int:
    """The set of the dispatch keys of these names, as a number: older versions of torch compare no sets."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    for name in names[1:]:
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return keys.raw_repr()


# By (is_cuda, is_inference): the keys of a tensor that has its numbers where data_ptr() says, as they are.
# Whatever else a tensor is adds a key: a wrapper, batched, negated, zeros without memory, of another layout.
_PLAIN_KEYS = {
    (cuda, inference): _keys(kind, "Autocast" + kind)
    if inference
    else _keys(kind, "Autocast" + kind, "Autograd" + kind, "ADInplaceOrView")
    for cuda, kind in ((False, "CPU"), (True, "CUDA"))
    for inference in (False, True)
}


def unobserved(*tensors: Tensor) -> bool:
    """Whether an operator's call can go straight to the device's kernel, since nobody else looks at it.

    The dispatcher would ask subclasses, modes, transforms, tracers and profilers, and then call the kernel by
    way of C++: of a small call that is a fifth of its CPU time (docs/experiments.md). All tensors that the
    kernel reads have to be asked: any of them may be something else than its memory.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state()
        or torch.autograd._profiler_enabled()
    ):
        return False
    first = tensors[0]
    plain = _PLAIN_KEYS[first.is_cuda, first.is_inference()]
    for x in tensors:  # noqa: SIM110 - a generator takes longer, and so does !=
        if not (type(x) in _PLAIN_TYPES and _dispatch_keys(x).raw_repr() == plain):
            return False
    return True


def _whatever(number: float) -> bool:
    return True


is_constant = getattr(symbolic_shapes, "has_static_value", _whatever)
"""Whether a compiler that traces this knows a number's value, and not only an expression of others.

Older versions of torch don't tell; there every number is a constant, as it is in torch's own operators.
"""


def autocast(kind: str, *tensors: Tensor) -> list[Tensor]:
    """The tensors as scaled_dot_product_attention would take them under torch.autocast of a device type."""
    dtype = torch.get_autocast_dtype(kind)
    return [
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 and x.device.type == kind else x
        for x in tensors
    ]
