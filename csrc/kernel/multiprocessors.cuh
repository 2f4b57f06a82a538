#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "driver.cuh"
#include "errors.cuh"

namespace dash {

// Of the device, as far as this process may use it: a MIG device has those of its part, and under MPS a client has
// what CUDA_MPS_ACTIVE_THREAD_PERCENTAGE leaves it.
inline int multiprocessors(int device) {
    int count = 0;
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "device");
    return count;
}

// And of the context that the stream belongs to: a green context has some of them. The default stream belongs to the
// context that is current. A driver older than 12.4 knows no green contexts.
inline int multiprocessors(int device, cudaStream_t stream) {
    static auto* const context_of = driver_function<CUresult(CUstream, CUcontext*)>("cuStreamGetCtx", 9020);
    static auto* const resource_of =
        driver_function<CUresult(CUcontext, CUdevResource*, CUdevResourceType)>("cuCtxGetDevResource", 12040);
    int const of_device = multiprocessors(device);
    CUcontext context;
    CUdevResource resource;
    if (!context_of || !resource_of || context_of(stream, &context) != CUDA_SUCCESS ||
        resource_of(context, &resource, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS)
        return of_device;
    return std::min(of_device, int(resource.sm.smCount));
}

}  // namespace dash
