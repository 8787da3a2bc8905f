// The arguments of `update`, shared by the modules for CPU and CUDA.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "coefficients.h"
#include "types.h"

namespace infinity::adam {

struct UpdateNames {
    const std::string &format, &grad_dtype, &moment_format;
};

struct UpdateArrays {
    const pybind11::object &param, &master, &grad;
    const std::vector<pybind11::object>&moments, &scales;
    const pybind11::object& n;
};

// Returns the rule and its constants, from their names, with the factor of gradients. Constants of other rules are
// ignored. The rest of the result is zero.
Hyper to_hyper(const std::string& rule, const pybind11::kwargs& constants, double grad_scale);

UpdateCall to_update_call(const UpdateNames& names, const UpdateArrays& addresses, Hyper hyper,
                          const pybind11::object& step);

// Returns the addresses of a call's sources: of param, master (any in fp32), moments and scales, in this order.
Sources to_sources(const UpdateCall& call, const std::vector<pybind11::object>& addresses);

// Defines function `name` in `m`, which returns run(const UpdateCall&, Own...). Its arguments are those of every
// device, those of this one, of types Own... with `own` as names and defaults, and the constants of the rule.
template <class... Own, class Run, class... Names>
void def_update(pybind11::module_& m, const char* name, const Run& run, const Names&... own) {
    namespace py = pybind11;
    using namespace py::literals;
    m.def(
        name,
        [run](const std::string& rule, const py::object& param, const py::object& master, const py::object& grad,
              const std::vector<py::object>& moments, const std::vector<py::object>& scales, const py::object& n,
              const std::string& format, const std::string& grad_dtype, const std::string& moment_format,
              double grad_scale, const py::object& step, std::uint64_t key, std::uint64_t first, Own... own_arguments,
              const py::kwargs& constants) {
            Hyper hyper = to_hyper(rule, constants, grad_scale);
            hyper.random = {key, first};
            return run(to_update_call({format, grad_dtype, moment_format}, {param, master, grad, moments, scales, n},
                                      hyper, step),
                       own_arguments...);
        },
        "rule"_a, py::kw_only(), "param"_a, "master"_a, "grad"_a, "moments"_a, "scales"_a, "n"_a, "format"_a,
        "grad_dtype"_a, "moment_format"_a, "grad_scale"_a = 1.0, "step"_a, "key"_a = 0, "first"_a = 0, own...,
        "One step on n elements, in place.");
}

}  // namespace infinity::adam
