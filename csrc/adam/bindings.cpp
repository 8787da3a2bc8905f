// infinity._adam: addresses in, nothing allocated, the GIL released while working.
// Types and documentation for users of Python: infinity/_adam.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "adam.h"
#include "arguments.h"
#include "dispatch.h"
#include "thread_pool.h"

namespace py = pybind11;
using namespace py::literals;

namespace infinity::adam {
namespace {

struct Call {
    Format format;
    DType grad_dtype;
    const Kernels* kernels;
    std::size_t n;
    int threads;
    Arrays arrays;
};

template <class T>
T* pointer(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

Call check_call(const py::object& param, const py::object& master, const py::object& grad, const py::object& exp_avg,
                const py::object& exp_avg_sq, const py::object& n, const std::string& format,
                const std::string& grad_dtype, const py::object& threads, const std::string& isa) {
    Call call{};
    call.format = to_format(format);
    call.grad_dtype = to_dtype("grad_dtype", grad_dtype);
    call.kernels = &to_kernels(isa);
    call.n = to_count(n);
    call.threads = to_threads(threads);
    ArrayChecks checks(call.n);
    call.arrays.param = pointer<void>(checks.add("param", param, call.format == Format::kFp32 ? 4 : 2));
    if (call.format != Format::kFp32) {
        call.arrays.master = pointer<void>(checks.add("master", master, call.format == Format::kMaster ? 4 : 2));
    }
    call.arrays.grad = pointer<const void>(checks.add("grad", grad, call.grad_dtype == DType::kFp32 ? 4 : 2));
    call.arrays.exp_avg = pointer<float>(checks.add("exp_avg", exp_avg, 4));
    call.arrays.exp_avg_sq = pointer<float>(checks.add("exp_avg_sq", exp_avg_sq, 4));
    return call;
}

void run(const Call& call, Rule rule, const Coefficients& coefficients) {
    const py::gil_scoped_release release;
    update(*call.kernels, call.format, call.grad_dtype, rule, call.arrays, coefficients, call.n, call.threads);
}

void py_adam(const py::object& param, const py::object& master, const py::object& grad, const py::object& exp_avg,
             const py::object& exp_avg_sq, const py::object& n, const std::string& format,
             const std::string& grad_dtype, double lr, double beta1, double beta2, double eps, double weight_decay,
             const py::object& step, bool decoupled, double grad_scale, const py::object& threads,
             const std::string& isa) {
    check_not_negative("lr", lr);
    check_beta("beta1", beta1);
    check_beta("beta2", beta2);
    check_not_negative("eps", eps);
    check_not_negative("weight_decay", weight_decay);
    check_finite("lr * weight_decay", lr * weight_decay);
    check_finite("grad_scale", grad_scale);
    const Hyper hyper{lr, beta1, beta2, eps, weight_decay, grad_scale, to_step(step), decoupled};
    const Call call = check_call(param, master, grad, exp_avg, exp_avg_sq, n, format, grad_dtype, threads, isa);
    run(call, rule_of(hyper), make_coefficients(hyper));
}

void py_bare(const py::object& param, const py::object& master, const py::object& grad, const py::object& exp_avg,
             const py::object& exp_avg_sq, const py::object& n, const std::string& format,
             const std::string& grad_dtype, const py::object& threads, const std::string& isa) {
    const Call call = check_call(param, master, grad, exp_avg, exp_avg_sq, n, format, grad_dtype, threads, isa);
    run(call, Rule::kBare, Coefficients{});
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
    m.doc() = "Adam and AdamW over flat arrays in host memory, given by address.";
    install_fork_handler();
    m.def("adam", &py_adam, "param"_a, "master"_a, "grad"_a, "exp_avg"_a, "exp_avg_sq"_a, "n"_a, py::kw_only(),
          "format"_a, "grad_dtype"_a, "lr"_a, "beta1"_a, "beta2"_a, "eps"_a, "weight_decay"_a, "step"_a, "decoupled"_a,
          "grad_scale"_a = 1.0, "threads"_a = 0, "isa"_a = "auto", "One step on n elements, in place.");
    m.def("bare", &py_bare, "param"_a, "master"_a, "grad"_a, "exp_avg"_a, "exp_avg_sq"_a, "n"_a, py::kw_only(),
          "format"_a, "grad_dtype"_a, "threads"_a = 0, "isa"_a = "auto",
          "The reads and writes of adam() with one addition each: the floor that memory sets. Spoils the data.");
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
