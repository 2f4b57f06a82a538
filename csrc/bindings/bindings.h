#pragma once

#include <pybind11/pybind11.h>

// The extension module `_native`: each function adds one subject to it.

namespace dash::bindings {

void bind_schedules(pybind11::module_& m);
void bind_workspace(pybind11::module_& m);
void bind_kernels(pybind11::module_& m);
void bind_lab(pybind11::module_& m);

}  // namespace dash::bindings
