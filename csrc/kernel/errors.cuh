#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace dash {

inline void check(cudaError_t status, char const* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // or the next caller of the runtime, who has nothing to do with it, is told of it
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

}  // namespace dash
