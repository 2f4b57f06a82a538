#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace dash {

// A function of the CUDA driver, as it was in a version (12.4 is 12040), or null where the driver has none. It is found
// at run time: the library must load where there is no driver, or an older one than it was compiled for.
template <class Function>
Function* driver_function(char const* name, unsigned version) {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &result);
#else
    cudaGetDriverEntryPoint(name, &entry, cudaEnableDefault, &result);
#endif
    return reinterpret_cast<Function*>(entry);
}

}  // namespace dash
