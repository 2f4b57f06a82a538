#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <string>

#include "core/backward.h"

// What the enumerations of core/backward.h are called in Python.

namespace dash::bindings {

// The place of `name` in `names`, which are in the order of the enumeration.
template <typename Enum, size_t N>
Enum parse(std::string const& name, std::array<char const*, N> const& names, char const* what) {
    for (size_t i = 0; i < N; ++i) {
        if (name == names[i]) return Enum(i);
    }
    throw pybind11::value_error(std::string("no kernels for ") + what + " '" + name + "'");
}

inline constexpr std::array kElements = {"bf16", "fp16"};
inline constexpr std::array kSchedules = {"naive", "descending", "shift", "symmetric_shift"};

}  // namespace dash::bindings
