"""Tensors as the kernels address them."""

from torch import Tensor

from .torch_settings import uninitialized_like


def is_addressable(x: Tensor) -> bool:
    """Whether kernels can read and write x, (batch, seqlen, heads, head_dim) of 16-bit numbers, in place.

    They move 16 bytes at a time: the last dimension must be contiguous, the address and the other strides
    multiples of 16 bytes. A stride of 0 is no stride to bulk tensor copies.
    """
    batch_stride, row_stride, head_stride, element_stride = x.stride()
    in_units = not ((batch_stride | row_stride | head_stride) & 7 or x.data_ptr() & 15)
    return element_stride == 1 and in_units and bool(batch_stride and row_stride and head_stride)


def addressable(x: Tensor) -> Tensor:
    """x, or a copy where kernels cannot read it in place."""
    # contiguous() would hand x back where the odd stride is the one of a dimension of size 1.
    return x if is_addressable(x) else uninitialized_like(x).copy_(x)


def matrix(x: Tensor) -> tuple[int, int, int, int]:
    """The address and the strides of an `addressable` tensor, for the native functions."""
    batch_stride, row_stride, head_stride, _ = x.stride()
    return x.data_ptr(), batch_stride, row_stride, head_stride
