#pragma once

#include <pybind11/pybind11.h>

namespace ts {

// Adds the classes Arena and Block to the module.
void bind_arena(pybind11::module_& m);

}  // namespace ts
