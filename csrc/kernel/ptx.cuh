#pragma once

// Instructions that CuTe and CUTLASS do not wrap, each behind one name.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

namespace dash::ptx {

// threadIdx.x, read where it stands: the compiler neither moves it nor keeps it in a register.
__device__ __forceinline__ int thread_index() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

__device__ __forceinline__ uint32_t sm_id() {
    uint32_t id;
    asm("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
}

__device__ __forceinline__ uint32_t clock() {
    uint32_t cycles;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
    return cycles;
}

__device__ __forceinline__ uint64_t global_timer_ns() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

__device__ __forceinline__ uint32_t load_acquire(uint32_t const* word) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ uint32_t load_relaxed(uint32_t const* word) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void add_release(uint32_t* word, uint32_t value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t fetch_add_relaxed(uint32_t* word, uint32_t value) {
    uint32_t old;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(word), "r"(value) : "memory");
    return old;
}

__device__ __forceinline__ uint32_t fetch_add_acq_rel(uint32_t* word, uint32_t value) {
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(word), "r"(value) : "memory");
    return old;
}

// Orders the generic proxy (ordinary accesses, the tickets) and the async proxy (bulk copies) in global
// memory. The form for all state spaces costs a full memory barrier more.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ __forceinline__ void bulk_reduce_add(float* sum, float const* shared, uint32_t bytes) {
    uint32_t const source = cute::cast_smem_ptr_to_uint(shared);
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(sum), "r"(source),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until shared memory has been read and may be written again.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Waits until the writes have landed. The `.read` form would only say that shared memory has been read.
__device__ __forceinline__ void bulk_wait_complete() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Shared memory by its 32-bit address: the compiler then needs no 64-bit arithmetic.
__device__ __forceinline__ void store_shared(uint32_t address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void store_shared_quad(uint32_t address, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// A value of 8 or 16 bytes.
template <class T>
__device__ __forceinline__ T load_shared(uint32_t address) {
    static_assert(sizeof(T) == 8 || sizeof(T) == 16);
    if constexpr (sizeof(T) == 8) {
        uint2 words;
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address) : "memory");
        return reinterpret_cast<T const&>(words);
    } else {
        uint4 words;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                     : "r"(address)
                     : "memory");
        return reinterpret_cast<T const&>(words);
    }
}

// 16 bytes at once. An assignment may be taken apart by the compiler, into stores that use a quarter of each sector.
__device__ __forceinline__ void store_global(void* address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two floats to a register of 16-bit elements, `low` in the lower half.
template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t packed;
    if constexpr (sizeof(Element) == 2 && std::is_same_v<Element, cutlass::bfloat16_t>)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// And back.
template <class Element>
__device__ __forceinline__ float2 unpack(uint32_t packed) {
    if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>)
        return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
    else
        return __half22float2(reinterpret_cast<__half2 const&>(packed));
}

}  // namespace dash::ptx
