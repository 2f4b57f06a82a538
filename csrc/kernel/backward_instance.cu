// Compiled once for every combination; the build sets the three names.
#include "backward.cuh"

namespace dash {

template cudaError_t launch_backward<DASH_ELEMENT, DASH_HEAD_DIM, schedule::DASH_POLICY>(KernelArguments const&, int,
                                                                                         cudaStream_t);

}  // namespace dash
