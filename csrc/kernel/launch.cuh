#pragma once

#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include "arguments.cuh"

namespace dash {

using bf16 = cutlass::bfloat16_t;
using fp16 = cutlass::half_t;

// One of these is compiled in a translation unit of its own for every element type, head dimension and
// policy (backward_instance.cu).
template <class Element, int kHeadDim, class Policy>
cudaError_t launch_backward(KernelArguments const& args, int ctas, cudaStream_t stream);

}  // namespace dash
