#pragma once

#include <cstddef>
#include <cstdint>

// The whole interface between the kernels and their callers: plain structs and C functions, so that the
// kernel library depends on neither torch nor a Python version.

namespace dash {

enum class Element : int32_t { bf16 = 0, fp16 = 1 };
enum class ScheduleId : int32_t { naive = 0, descending = 1, shift = 2, symmetric_shift = 3 };

constexpr int64_t kWorkspaceAlignment = 256;

// (batch, row, head, head_dim) with a contiguous last dimension. Strides count elements; the pointer
// and all strides in bytes are multiples of 16, as the bulk tensor copies ask.
struct MatrixView {
    void* data;
    int64_t batch_stride;
    int64_t row_stride;
    int64_t head_stride;
};

struct BackwardParams {
    MatrixView q, k, v, out, dout;  // inputs
    MatrixView dq, dk, dv;          // outputs, written completely
    float const* lse;               // (batch, heads_q, seqlen_q), natural logarithm, contiguous
    float const* dlse;              // the gradient of lse, in its shape, or null; ignored where lse is -inf
    void* workspace;  // workspace_layout(params).bytes bytes, aligned to kWorkspaceAlignment; need not be cleared

    int32_t batch;
    int32_t seqlen_q, seqlen_k;
    int32_t heads_q, heads_k;
    int32_t head_dim;
    float softmax_scale;
    int32_t causal;  // 0 or 1, aligned to the lower right corner
    Element element;
    ScheduleId schedule;
    int32_t ordered;  // 0: dQ is summed in the order of arrival, the control of experiments

    int32_t device;
    int32_t sm_margin;       // SMs left to others
    uint64_t wait_limit_ns;  // a CTA that waits longer for its turn, while nobody else gets ahead either, traps
    void* stream;            // cudaStream_t
};

}  // namespace dash

extern "C" {

// All return 0, or another number with a text in `message`. Nothing was launched then.

// Clears the counters (and the sum of dQ, if it has no order), and writes zeros to the rows of dQ that see no key.
int dash_backward_prepare(dash::BackwardParams const* params, char* message, size_t message_size);
// The main kernel; prepare comes first on the same stream.
int dash_backward_run(dash::BackwardParams const* params, char* message, size_t message_size);
// The number of CTAs of a stream (a cudaStream_t) that can be resident at the same time, or -1: the bound for cyclic
// schedules. Fewer than the device has SMs in a green context, under MPS and on a MIG device.
int dash_resident_ctas(int device, void* stream, int sm_margin, char* message, size_t message_size);
// 1, with a text, if a CTA ran into wait_limit_ns since the library was loaded; else 0. Works after the trap.
int dash_stuck_report(char* message, size_t message_size);
}
