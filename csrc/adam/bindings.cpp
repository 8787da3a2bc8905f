// Python bindings of infinity.native._adam: take addresses, allocate nothing, release the GIL.
// Documented in infinity/native/_adam.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>

#include "adam.h"
#include "arguments.h"
#include "dispatch.h"
#include "frozen_bindings.h"
#include "rules.h"
#include "thread_pool.h"
#include "update_call.h"

namespace py = pybind11;
using namespace py::literals;

namespace infinity::adam {
namespace {

const Kernels& to_kernels(const std::string& isa) {
    const std::vector<Isa>& isas = available_isas();
    if (isa == "auto") return *isas.front().kernels;
    std::string names = "'auto'";
    for (const Isa& known : isas) {
        if (isa == known.name) return *known.kernels;
        names += std::string(", '") + known.name + "'";
    }
    throw py::value_error("isa '" + isa + "' is not available on this machine: pass one of " + names);
}

// Hyper-parameters that several updates share. A call with 20 names takes pybind11 longer than a small update takes, so
// they are converted once, and `py_prepare` has positional arguments.
struct Group {
    Hyper hyper;
};

UpdateCall py_prepare(const Group& group, const py::object& param, const py::object& master, const py::object& grad,
                      const std::vector<py::object>& moments, const std::vector<py::object>& scales,
                      const py::object& n, const std::string& format, const std::string& grad_dtype,
                      const std::string& moment_format, const py::object& step, std::uint64_t key) {
    Hyper hyper = group.hyper;
    hyper.random = {key, 0};
    return to_update_call({format, grad_dtype, moment_format}, {param, master, grad, moments, scales, n}, hyper, step);
}

void py_update_all(const std::vector<UpdateCall>& calls, const py::object& threads, const std::string& isa) {
    const Kernels& kernels = to_kernels(isa);
    const int workers = to_threads(threads);
    const py::gil_scoped_release release;
    update_all(kernels, calls, workers);
}

void py_bare(const std::vector<std::tuple<std::uintptr_t, std::size_t, bool>>& streams, const py::object& threads) {
    const int workers = to_threads(threads);
    std::vector<Stream> list;
    for (const auto& [address, nbytes, writes] : streams) {
        if ((address == 0 && nbytes > 0) || address % 4 != 0) {
            throw py::value_error("a stream is at a null address, or not at a word's: pass tensor.data_ptr()");
        }
        constexpr std::size_t kEnd = std::size_t{1} << 63;
        if (address >= kEnd || nbytes >= kEnd - address) {
            throw py::value_error("a stream ends beyond the address space: pass the bytes of a tensor");
        }
        list.push_back({pointer<char>(address), nbytes, writes});
    }
    const py::gil_scoped_release release;
    bare(*available_isas().front().kernels, list, workers);
}

void py_first_touch(const py::object& address, const py::object& nbytes, const py::object& threads) {
    const std::size_t count = to_count(nbytes);
    const int workers = to_threads(threads);
    ArrayChecks checks(count);
    void* memory = pointer<void>(checks.add("address", address, 1));
    const py::gil_scoped_release release;
    first_touch(memory, count, workers);
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

double py_receive(const py::object& source, const py::object& target, const py::object& n,
                  const std::string& source_dtype, const std::string& target_dtype, bool add, double initial,
                  const py::object& threads, const std::string& isa) {
    const DType from_type = to_dtype("source_dtype", source_dtype), to_type = to_dtype("target_dtype", target_dtype);
    const Kernels& kernels = to_kernels(isa);
    const std::size_t count = to_count(n);
    const int workers = to_threads(threads);
    ArrayChecks checks(count);
    const void* from = pointer<const void>(checks.add("source", source, from_type == DType::kFp32 ? 4 : 2));
    void* to = pointer<void>(checks.add("target", target, to_type == DType::kFp32 ? 4 : 2));
    const py::gil_scoped_release release;
    return receive(kernels, from, from_type, to, to_type, count, add, initial, workers);
}

// Returns a number of bytes that is a multiple of a word's.
std::size_t to_whole_words(const py::object& nbytes) {
    const std::size_t count = to_count(nbytes);
    if (count % 8 != 0) throw py::value_error("nbytes is " + std::to_string(count) + ": pass a multiple of 8");
    return count;
}

std::uint64_t py_fingerprint(const py::object& address, const py::object& nbytes, const py::object& threads,
                             const std::string& isa) {
    const Kernels& kernels = to_kernels(isa);
    const std::size_t count = to_whole_words(nbytes);
    const int workers = to_threads(threads);
    ArrayChecks checks(count / 8);
    const void* memory = pointer<const void>(checks.add("address", address, 8));
    const py::gil_scoped_release release;
    return fingerprint(kernels, memory, count, workers);
}

std::uint64_t py_copy(const py::object& source, const py::object& target, const py::object& nbytes,
                      const py::object& threads, const std::string& isa) {
    const Kernels& kernels = to_kernels(isa);
    const std::size_t count = to_whole_words(nbytes);
    const int workers = to_threads(threads);
    ArrayChecks checks(count / 8);
    const void* from = pointer<const void>(checks.add("source", source, 8));
    void* to = pointer<void>(checks.add("target", target, 8));
    const py::gil_scoped_release release;
    return copy(kernels, from, to, count, workers);
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
    m.doc() = "Optimizer steps over flat arrays in host memory, passed by address.";
    install_fork_handler();
    py::class_<UpdateCall>(m, "Update", py::module_local(), "A validated update, which `update_all` performs.");
    py::class_<Group>(m, "Group", py::module_local(), "Hyper-parameters that several updates share.")
        .def(py::init([](const std::string& rule, double grad_scale, const py::kwargs& constants) {
                 return Group{to_hyper(rule, constants, grad_scale)};
             }),
             "rule"_a, py::kw_only(), "grad_scale"_a = 1.0)
        .def("prepare", &py_prepare, "Validate an update, for `update_all`.");
    m.def("update_all", &py_update_all, "updates"_a, "threads"_a = 0, "isa"_a = "auto",
          "Perform prepared updates together, as if one after another.");
    def_update<const py::object&, bool, const std::string&, const std::vector<py::object>&>(
        m, "update",
        [](const UpdateCall& call, const py::object& threads, bool background, const std::string& isa,
           const std::vector<py::object>& addresses) {
            const Kernels& kernels = to_kernels(isa);
            const int workers = to_threads(threads);
            const Priority priority = background ? Priority::kBackground : Priority::kNormal;
            Arrays arrays = call.arrays;
            if (!addresses.empty()) arrays.from = to_sources(call, addresses);
            const py::gil_scoped_release release;
            update(kernels, call.format, call.rule, arrays, call.coefficients, call.n, workers, priority);
        },
        "threads"_a = 0, "background"_a = false, "isa"_a = "auto", "sources"_a = std::vector<py::object>{});
    m.def("bare", &py_bare, "streams"_a, "threads"_a = 0,
          "Read and write with an update's access pattern, one addition per word, as a lower bound of its time. "
          "Destroys the data of written streams.");
    m.def("first_touch", &py_first_touch, "address"_a, "nbytes"_a, "threads"_a = 0,
          "Write zeros with the threads of an update there.");
    m.attr("BLOCK") = kBlock;
    py::tuple rules(kRules);
    for (std::size_t i = 0; i < kRules; ++i) {
        const RuleRow& row = Rules::kRows[i];
        py::tuple constants(row.count);
        for (std::size_t k = 0; k < row.count; ++k) constants[k] = row.constants[k].name;
        rules[i] = py::make_tuple(row.name, row.moments, row.root, constants);
    }
    m.attr("RULES") = rules;
    m.def("sum_of_squares", &py_sum_of_squares, "address"_a, "n"_a, "dtype"_a, py::kw_only(), "scale"_a = 1.0,
          "initial"_a = 0.0, "threads"_a = 0, "isa"_a = "auto",
          "Return initial + sum of (scale * x)^2 in fp64, bit-identical for any number of threads.");
    m.def("receive", &py_receive, "source"_a, "target"_a, "n"_a, py::kw_only(), "source_dtype"_a, "target_dtype"_a,
          "add"_a = false, "initial"_a = 0.0, "threads"_a = 0, "isa"_a = "auto",
          "Set target = source, or target += source; return initial + the sum of squares of the result.");
    m.def("fingerprint", &py_fingerprint, "address"_a, "nbytes"_a, "threads"_a = 0, "isa"_a = "auto",
          "Return a 64-bit hash of the bytes, independent of the number of threads.");
    m.def("copy", &py_copy, "source"_a, "target"_a, "nbytes"_a, "threads"_a = 0, "isa"_a = "auto",
          "Copy the bytes and return their fingerprint, in one pass over memory.");
    m.def("split", &py_split, "master"_a, "param"_a, "remainder"_a, "n"_a, "threads"_a = 0, "isa"_a = "auto",
          "Split fp32 into bf16 (half away from zero) and the int16 remainder.");
    m.def("join", &py_join, "param"_a, "remainder"_a, "master"_a, "n"_a, "threads"_a = 0, "isa"_a = "auto",
          "Join bf16 and int16 remainder to fp32.");
    def_frozen(m, to_kernels);
    m.def("available_isas", &isa_names, "Return the instruction sets that this machine supports, fastest first.");
    m.def("default_isa", [] { return std::string(available_isas().front().name); }, "Return the isa of 'auto'.");
    m.def("default_threads", &default_threads, "Return the number of processors that this thread may run on.");
}

}  // namespace
}  // namespace infinity::adam
