#include "bindings.h"

// No torch and no CUDA in here: this module is built and imported on every machine.
PYBIND11_MODULE(_native, m) {
    m.doc() = "The schedules and their simulator, the workspace's size, and the calls into the kernel library.";
    dash::bindings::bind_schedules(m);
    dash::bindings::bind_workspace(m);
    dash::bindings::bind_kernels(m);
    dash::bindings::bind_lab(m);
}
