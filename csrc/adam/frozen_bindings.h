#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "types.h"

namespace infinity::adam {

// Adds the functions of frozen parameters. to_kernels: of the instruction set of this name.
void def_frozen(pybind11::module_& m, const Kernels& (*to_kernels)(const std::string& isa));

}  // namespace infinity::adam
