#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "bindings.h"
#include "kernel_library.h"
#include "names.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace dash::bindings {
namespace {

// What Python passes: (data pointer, batch stride, row stride, head stride), strides in elements.
using Matrix = std::tuple<uintptr_t, int64_t, int64_t, int64_t>;
// (batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim)
using Shape = std::tuple<int, int, int, int, int, int>;

MatrixView view(Matrix const& m) {
    auto const [data, batch_stride, row_stride, head_stride] = m;
    return {reinterpret_cast<void*>(data), batch_stride, row_stride, head_stride};
}

void backward(Matrix const& q, Matrix const& k, Matrix const& v, Matrix const& out, Matrix const& dout,
              Matrix const& dq, Matrix const& dk, Matrix const& dv, uintptr_t lse, uintptr_t dlse, uintptr_t workspace,
              Shape const& shape, float softmax_scale, bool causal, std::string const& element,
              std::string const& schedule, bool ordered, int device, int sm_margin, uint64_t wait_limit_ns,
              uintptr_t stream, bool prepare) {
    BackwardParams p{};
    p.q = view(q);
    p.k = view(k);
    p.v = view(v);
    p.out = view(out);
    p.dout = view(dout);
    p.dq = view(dq);
    p.dk = view(dk);
    p.dv = view(dv);
    p.lse = reinterpret_cast<float const*>(lse);
    p.dlse = reinterpret_cast<float const*>(dlse);
    p.workspace = reinterpret_cast<void*>(workspace);
    std::tie(p.batch, p.seqlen_q, p.seqlen_k, p.heads_q, p.heads_k, p.head_dim) = shape;
    p.softmax_scale = softmax_scale;
    p.causal = causal;
    p.element = parse<Element>(element, kElements, "dtype");
    p.schedule = parse<ScheduleId>(schedule, kSchedules, "schedule");
    p.ordered = ordered;
    p.device = device;
    p.sm_margin = sm_margin;
    p.wait_limit_ns = wait_limit_ns;
    p.stream = reinterpret_cast<void*>(stream);

    KernelLibrary const& library = KernelLibrary::instance();
    library.require_open();
    char message[512] = "";
    int error = 0;
    {
        py::gil_scoped_release no_gil;
        if (prepare) error = library.prepare(&p, message, sizeof message);
        if (error == 0) error = library.run(&p, message, sizeof message);
    }
    if (error != 0) throw std::runtime_error(message);
}

int resident_ctas(int device, int sm_margin, uintptr_t stream) {
    KernelLibrary const& library = KernelLibrary::instance();
    library.require_open();
    char message[512] = "";
    int const ctas = library.resident_ctas(device, reinterpret_cast<void*>(stream), sm_margin, message, sizeof message);
    if (ctas < 0) throw std::runtime_error(message);
    return ctas;
}

std::optional<std::string> stuck_report() {
    KernelLibrary const& library = KernelLibrary::instance();
    library.require_open();
    char message[512] = "";
    int const stuck = library.stuck_report(message, sizeof message);
    if (stuck < 0) throw std::runtime_error(message);
    return stuck ? std::optional<std::string>(message) : std::nullopt;
}

}  // namespace

void bind_kernels(py::module_& m) {
    m.def("load_kernels", [](std::string const& path) { KernelLibrary::instance().open(path); }, "path"_a);
    m.def("kernels_loaded", [] { return KernelLibrary::instance().is_open(); });
    m.def("resident_ctas", &resident_ctas, "device"_a, "sm_margin"_a = 0, "stream"_a = 0);
    m.def("stuck_report", &stuck_report);
    m.def("backward", &backward, "q"_a, "k"_a, "v"_a, "out"_a, "dout"_a, "dq"_a, "dk"_a, "dv"_a, "lse"_a, "dlse"_a,
          "workspace"_a, "shape"_a, "softmax_scale"_a, "causal"_a, "element"_a, "schedule"_a, "ordered"_a, "device"_a,
          "sm_margin"_a, "wait_limit_ns"_a, "stream"_a, py::kw_only(), "prepare"_a = true);
}

}  // namespace dash::bindings
