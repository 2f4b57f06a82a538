#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>

#include "core/backward.h"

namespace dash::bindings {

// libdash_kernels.so, opened by path at run time: it depends on no Python, and a machine without it still
// has everything else. It stays open until the process ends.
class KernelLibrary {
  public:
    static KernelLibrary& instance() {
        static KernelLibrary library;
        return library;
    }

    // Raises where the file or one of its functions is missing; what was open before stays in use then.
    void open(std::string const& path) {
        void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) throw std::runtime_error(dlerror());
        KernelLibrary opened;
        opened.prepare = reinterpret_cast<decltype(prepare)>(symbol(handle, "dash_backward_prepare"));
        opened.run = reinterpret_cast<decltype(run)>(symbol(handle, "dash_backward_run"));
        opened.resident_ctas = reinterpret_cast<decltype(resident_ctas)>(symbol(handle, "dash_resident_ctas"));
        opened.stuck_report = reinterpret_cast<decltype(stuck_report)>(symbol(handle, "dash_stuck_report"));
        *this = opened;
    }

    bool is_open() const { return run != nullptr; }

    void require_open() const {
        if (!is_open()) throw std::runtime_error("the kernel library is not loaded");
    }

    decltype(&dash_backward_prepare) prepare = nullptr;
    decltype(&dash_backward_run) run = nullptr;
    decltype(&dash_resident_ctas) resident_ctas = nullptr;
    decltype(&dash_stuck_report) stuck_report = nullptr;

  private:
    static void* symbol(void* handle, char const* name) {
        void* const address = dlsym(handle, name);
        if (address == nullptr) throw std::runtime_error(dlerror());
        return address;
    }
};

}  // namespace dash::bindings
