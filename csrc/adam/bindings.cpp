// infinity._adam: addresses in, nothing allocated, the GIL released while working.
// Types and documentation for users of Python: infinity/_adam.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>

#include "adam.h"
#include "arguments.h"
#include "dispatch.h"
#include "thread_pool.h"

namespace py = pybind11;
using namespace py::literals;

namespace infinity::adam {
namespace {

template <class T>
T* pointer(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

constexpr const char* kMomentNames[] = {"moments[0]", "moments[1]"};
constexpr const char* kScaleNames[] = {"scales[0]", "scales[1]"};

Hyper to_hyper(const std::string& rule, double lr, double beta1, double beta2, double eps, double weight_decay,
               double momentum, double dampening, double lr_decay, bool nesterov, double grad_scale,
               const py::object& step, std::uint64_t key, std::uint64_t first) {
    check_not_negative("lr", lr);
    check_beta("beta1", beta1);
    check_beta("beta2", beta2);
    check_not_negative("eps", eps);
    check_not_negative("weight_decay", weight_decay);
    check_finite("lr * weight_decay", lr * weight_decay);
    check_not_negative("momentum", momentum);
    check_finite("dampening", dampening);
    check_not_negative("lr_decay", lr_decay);
    check_finite("grad_scale", grad_scale);
    if (first % kBlock != 0) {
        throw py::value_error("first is " + std::to_string(first) + ": arrays begin with a block, at a multiple of " +
                              std::to_string(kBlock));
    }
    return {to_rule(rule), lr,        beta1,    beta2,    eps,           weight_decay, grad_scale,
            momentum,      dampening, lr_decay, nesterov, to_step(step), {key, first}};
}

void py_update(const std::string& rule, const py::object& param, const py::object& master, const py::object& grad,
               const std::vector<py::object>& moments, const std::vector<py::object>& scales, const py::object& n,
               const std::string& format, const std::string& grad_dtype, const std::string& moment_format, double lr,
               double beta1, double beta2, double eps, double weight_decay, double momentum, double dampening,
               double lr_decay, bool nesterov, double grad_scale, const py::object& step, std::uint64_t key,
               std::uint64_t first, const py::object& threads, const std::string& isa) {
    const Hyper hyper = to_hyper(rule, lr, beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay, nesterov,
                                 grad_scale, step, key, first);
    const Format kind = to_format(format);
    const Kernels& kernels = to_kernels(isa);
    const std::size_t count = to_count(n);
    const int workers = to_threads(threads);
    Arrays arrays{};
    arrays.grad_dtype = to_dtype("grad_dtype", grad_dtype);
    arrays.moments = to_moments(moment_format);
    ArrayChecks checks(count);
    arrays.param = pointer<void>(checks.add("param", param, kind == Format::kFp32 ? 4 : 2));
    if (kind != Format::kFp32) {
        arrays.master = pointer<void>(checks.add("master", master, kind == Format::kRemainder ? 2 : 4));
    }
    arrays.grad = pointer<const void>(checks.add("grad", grad, arrays.grad_dtype == DType::kFp32 ? 4 : 2));
    const std::size_t wanted = moments_of(hyper.rule);
    const bool eight = arrays.moments == Moments::kEight;
    if (moments.size() != wanted || scales.size() != (eight ? wanted : 0)) {
        throw py::value_error(rule + " with moments of " + moment_format + " takes " + std::to_string(wanted) +
                              " moments and " + std::to_string(eight ? wanted : 0) + " scales, not " +
                              std::to_string(moments.size()) + " and " + std::to_string(scales.size()));
    }
    const std::size_t width = eight ? 1 : arrays.moments == Moments::kBf16 ? 2 : 4;
    for (std::size_t k = 0; k < wanted; ++k) {
        arrays.moment[k] = pointer<void>(checks.add(kMomentNames[k], moments[k], width));
        if (!eight) continue;
        const std::size_t blocks = (count + kBlock - 1) / kBlock;
        arrays.scale[k] = pointer<std::uint8_t>(checks.add(kScaleNames[k], scales[k], 1, blocks));
    }
    const Coefficients coefficients = make_coefficients(hyper);
    const py::gil_scoped_release release;
    update(kernels, kind, effective_rule(hyper), arrays, coefficients, count, workers);
}

void py_bare(const std::vector<std::tuple<std::uintptr_t, std::size_t, bool>>& streams, const py::object& threads) {
    const int workers = to_threads(threads);
    std::vector<Stream> list;
    for (const auto& [address, nbytes, writes] : streams) {
        if ((address == 0 && nbytes > 0) || address % 4 != 0) {
            throw py::value_error("a stream is at a null address, or not at a word's: pass tensor.data_ptr()");
        }
        list.push_back({pointer<char>(address), nbytes, writes});
    }
    const py::gil_scoped_release release;
    bare(*available_isas().front().kernels, list, workers);
}

double py_sum_of_squares(const py::object& address, const py::object& n, const std::string& dtype, double scale,
                         double initial, const py::object& threads, const std::string& isa) {
    const DType type = to_dtype("dtype", dtype);
    const Kernels& kernels = to_kernels(isa);
    const std::size_t count = to_count(n);
    const int workers = to_threads(threads);
    check_finite("scale", scale);
    ArrayChecks checks(count);
    const void* values = pointer<const void>(checks.add("address", address, type == DType::kFp32 ? 4 : 2));
    const py::gil_scoped_release release;
    return sum_of_squares(kernels, type, values, count, scale, initial, workers);
}

void py_split(const py::object& master, const py::object& param, const py::object& remainder, const py::object& n,
              const py::object& threads, const std::string& isa) {
    const Kernels& kernels = to_kernels(isa);
    const std::size_t count = to_count(n);
    const int workers = to_threads(threads);
    ArrayChecks checks(count);
    const auto* from = pointer<const float>(checks.add("master", master, 4));
    auto* high = pointer<std::uint16_t>(checks.add("param", param, 2));
    auto* low = pointer<std::int16_t>(checks.add("remainder", remainder, 2));
    const py::gil_scoped_release release;
    split(kernels, from, high, low, count, workers);
}

void py_join(const py::object& param, const py::object& remainder, const py::object& master, const py::object& n,
             const py::object& threads, const std::string& isa) {
    const Kernels& kernels = to_kernels(isa);
    const std::size_t count = to_count(n);
    const int workers = to_threads(threads);
    ArrayChecks checks(count);
    const auto* high = pointer<const std::uint16_t>(checks.add("param", param, 2));
    const auto* low = pointer<const std::int16_t>(checks.add("remainder", remainder, 2));
    auto* to = pointer<float>(checks.add("master", master, 4));
    const py::gil_scoped_release release;
    join(kernels, high, low, to, count, workers);
}

std::vector<std::string> isa_names() {
    std::vector<std::string> names;
    for (const Isa& isa : available_isas()) names.emplace_back(isa.name);
    return names;
}

PYBIND11_MODULE(_adam, m) {
    m.doc() = "Optimizer steps over flat arrays in host memory, given by address.";
    install_fork_handler();
    m.def("update", &py_update, "rule"_a, py::kw_only(), "param"_a, "master"_a, "grad"_a, "moments"_a, "scales"_a,
          "n"_a, "format"_a, "grad_dtype"_a, "moment_format"_a, "lr"_a, "beta1"_a = 0.9, "beta2"_a = 0.999,
          "eps"_a = 1e-8, "weight_decay"_a = 0.0, "momentum"_a = 0.0, "dampening"_a = 0.0, "lr_decay"_a = 0.0,
          "nesterov"_a = false, "grad_scale"_a = 1.0, "step"_a, "key"_a = 0, "first"_a = 0, "threads"_a = 0,
          "isa"_a = "auto", "One step on n elements, in place.");
    m.def("bare", &py_bare, "streams"_a, "threads"_a = 0,
          "Reads and writes as an update does, with one addition a word: the floor that memory sets. Spoils the data.");
    m.attr("BLOCK") = kBlock;
    m.def("sum_of_squares", &py_sum_of_squares, "address"_a, "n"_a, "dtype"_a, py::kw_only(), "scale"_a = 1.0,
          "initial"_a = 0.0, "threads"_a = 0, "isa"_a = "auto",
          "initial + sum of (scale * x)^2 in fp64, the same bits for any number of threads.");
    m.def("split", &py_split, "master"_a, "param"_a, "remainder"_a, "n"_a, "threads"_a = 0, "isa"_a = "auto",
          "fp32 to bf16 (half away from zero) and the int16 that makes it exact.");
    m.def("join", &py_join, "param"_a, "remainder"_a, "master"_a, "n"_a, "threads"_a = 0, "isa"_a = "auto",
          "bf16 and int16 back to fp32.");
    m.def("available_isas", &isa_names, "Instruction sets of this build that this machine runs, fastest first.");
    m.def("default_isa", [] { return std::string(available_isas().front().name); }, "What isa='auto' means here.");
    m.def("default_threads", &default_threads, "What threads=0 means here: processors this thread may run on.");
}

}  // namespace
}  // namespace infinity::adam
