#pragma once

// The schedules run in kernels, in the Python bindings and in tests: one source, two compilers.
#if defined(__CUDACC__)
#define DASH_HD __host__ __device__ __forceinline__
#else
#define DASH_HD inline
#endif
