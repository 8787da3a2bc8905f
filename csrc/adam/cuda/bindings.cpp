// Python bindings of infinity.native._adam_cuda: take device addresses, launch kernels on a stream without
// synchronization, allocate nothing. Documented in infinity/native/_adam_cuda.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../arguments.h"
#include "../frozen_arguments.h"
#include "../update_call.h"
#include "launch.h"

namespace py = pybind11;
using namespace py::literals;

namespace infinity::adam::cuda {
namespace {

void py_sum_of_squares(const py::object& address, const py::object& n, const std::string& dtype, const py::object& out,
                       const py::object& tiles, double scale, double initial, const py::object& initial_at, int device,
                       std::uintptr_t stream) {
    check_finite("scale", scale);
    Sum sum{};
    sum.n = to_count(n);
    sum.dtype = to_dtype("dtype", dtype);
    sum.scale = scale;
    sum.initial = initial;
    ArrayChecks arrays(sum.n), results(1);
    sum.values = pointer<const void>(arrays.add("address", address, sum.dtype == DType::kFp32 ? 4 : 2));
    sum.tiles = pointer<double>(arrays.add("tiles", tiles, 8, (sum.n + kSumTile - 1) / kSumTile));
    sum.out = pointer<double>(results.add("out", out, 8));
    if (!initial_at.is_none()) sum.initial_at = pointer<const double>(ArrayChecks(1).add("initial_at", initial_at, 8));
    const py::gil_scoped_release release;
    sum_of_squares(sum, {device, stream});
}

// The sums of some ranges [start, stop) of an array, each into its element of `out`.
void py_sums_of_squares(const py::object& address, const py::object& n, const std::string& dtype,
                        const std::vector<std::pair<std::size_t, std::size_t>>& ranges, const py::object& out,
                        const py::object& tiles, int device, std::uintptr_t stream) {
    const std::size_t count = to_count(n);
    std::size_t needed = 0;
    for (const auto& [start, stop] : ranges) {
        if (start > stop || stop > count) {
            throw py::value_error("ranges has [" + std::to_string(start) + ", " + std::to_string(stop) +
                                  "): pass ranges of the " + std::to_string(count) + " elements");
        }
        needed += (stop - start + kSumTile - 1) / kSumTile;
    }
    Sum sum{};
    sum.dtype = to_dtype("dtype", dtype);
    sum.scale = 1.0;
    const std::size_t width = sum.dtype == DType::kFp32 ? 4 : 2;
    ArrayChecks arrays(count), results(ranges.size());
    const auto* values = pointer<const char>(arrays.add("address", address, width));
    sum.tiles = pointer<double>(arrays.add("tiles", tiles, 8, needed));
    sum.out = pointer<double>(results.add("out", out, 8));
    const py::gil_scoped_release release;
    for (const auto& [start, stop] : ranges) {
        sum.values = values + start * width;
        sum.n = stop - start;
        sum_of_squares(sum, {device, stream});
        sum.tiles += (sum.n + kSumTile - 1) / kSumTile;
        ++sum.out;
    }
}

void py_fingerprint(const py::object& address, const py::object& nbytes, const py::object& out, int device,
                    std::uintptr_t stream) {
    const std::size_t count = to_count(nbytes);
    if (count % 8 != 0) throw py::value_error("nbytes is " + std::to_string(count) + ": pass a multiple of 8");
    const void* memory = pointer<const void>(ArrayChecks(count / 8).add("address", address, 8));
    auto* sum = pointer<std::uint64_t>(ArrayChecks(1).add("out", out, 8));
    const py::gil_scoped_release release;
    fingerprint(memory, count, sum, {device, stream});
}

void py_store(const py::object& address, const py::object& host, const py::object& nbytes, int device,
              std::uintptr_t stream) {
    const std::size_t count = to_count(nbytes);
    ArrayChecks checks(count);
    const auto* from = pointer<const void>(checks.add("address", address, 1));
    auto* to = pointer<void>(checks.add("host", host, 1));
    const py::gil_scoped_release release;
    store(from, to, count, {device, stream});
}

void py_split(const py::object& master, const py::object& param, const py::object& remainder, const py::object& n,
              int device, std::uintptr_t stream) {
    const std::size_t count = to_count(n);
    ArrayChecks checks(count);
    const auto* from = pointer<const float>(checks.add("master", master, 4));
    auto* high = pointer<std::uint16_t>(checks.add("param", param, 2));
    auto* low = pointer<std::int16_t>(checks.add("remainder", remainder, 2));
    const py::gil_scoped_release release;
    split(from, high, low, count, {device, stream});
}

void py_join(const py::object& param, const py::object& remainder, const py::object& master, const py::object& n,
             int device, std::uintptr_t stream) {
    const std::size_t count = to_count(n);
    ArrayChecks checks(count);
    const auto* high = pointer<const std::uint16_t>(checks.add("param", param, 2));
    const auto* low = pointer<const std::int16_t>(checks.add("remainder", remainder, 2));
    auto* to = pointer<float>(checks.add("master", master, 4));
    const py::gil_scoped_release release;
    join(high, low, to, count, {device, stream});
}

void py_decode_frozen(const py::object& records, const py::object& values, const py::object& n, const std::string& code,
                      const std::string& dtype, int device, std::uintptr_t stream) {
    const Code from = to_code(code);
    const DType of = to_dtype("dtype", dtype);
    const std::size_t count = to_records(n);
    constexpr std::size_t kAlignment = 16;
    const FrozenArrays arrays = to_frozen_arrays(records, values, count, from, of, true, kAlignment);
    const py::gil_scoped_release release;
    decode(from, of, arrays.records, arrays.values, count, {device, stream});
}

std::vector<std::string> architectures() {  // in CMake's notation: 75-real;90
    std::vector<std::string> names;
    std::istringstream list(INFINITY_CUDA_ARCHITECTURES);
    for (std::string name; std::getline(list, name, ' ');) {
        const std::string number = name.substr(0, name.find('-'));
        if (name.find("-virtual") == std::string::npos) names.push_back("sm_" + number);
        if (name.find("-real") == std::string::npos) names.push_back("compute_" + number);
    }
    return names;
}

PYBIND11_MODULE(_adam_cuda, m) {
    m.doc() = "Optimizer steps over flat arrays in a CUDA device's memory, passed by address.";
    def_update<int, std::uintptr_t>(
        m, "update",
        [](const UpdateCall& call, int device, std::uintptr_t stream) {
            const py::gil_scoped_release release;
            update(call.format, call.rule, call.arrays, call.coefficients, call.n, {device, stream});
        },
        "device"_a, "stream"_a);
    m.def("sum_of_squares", &py_sum_of_squares, "address"_a, "n"_a, "dtype"_a, py::kw_only(), "out"_a, "tiles"_a,
          "scale"_a = 1.0, "initial"_a = 0.0, "initial_at"_a = py::none(), "device"_a, "stream"_a,
          "Write initial + sum of (scale * x)^2 in fp64 to `out`.");
    m.def("sums_of_squares", &py_sums_of_squares, "address"_a, "n"_a, "dtype"_a, "ranges"_a, py::kw_only(), "out"_a,
          "tiles"_a, "device"_a, "stream"_a, "Write the sum of x^2 of each range in fp64 to `out`.");
    m.def("fingerprint", &py_fingerprint, "address"_a, "nbytes"_a, py::kw_only(), "out"_a, "device"_a, "stream"_a,
          "Add the 64-bit hash of the bytes to the integer at `out`.");
    m.def("store", &py_store, "address"_a, "host"_a, "nbytes"_a, py::kw_only(), "device"_a, "stream"_a,
          "Write bytes to registered host memory.");
    m.def("split", &py_split, "master"_a, "param"_a, "remainder"_a, "n"_a, py::kw_only(), "device"_a, "stream"_a,
          "Split fp32 into bf16 (half away from zero) and the int16 remainder.");
    m.def("join", &py_join, "param"_a, "remainder"_a, "master"_a, "n"_a, py::kw_only(), "device"_a, "stream"_a,
          "Join bf16 and int16 remainder to fp32.");
    m.def("decode_frozen", &py_decode_frozen, "records"_a, "values"_a, "n"_a, py::kw_only(), "code"_a, "dtype"_a,
          "device"_a, "stream"_a, "Decode frozen parameters.");
    m.def("device_count", &device_count, "Return the number of devices; 0 without a driver.");
    m.def("refusal", &refusal, "Return CUDA's error if there is no device; empty otherwise.");
    m.def("compute_capability", &compute_capability, "device"_a, "Return 10 * major + minor.");
    m.attr("ARCHITECTURES") = architectures();
    m.attr("TOOLKIT") = INFINITY_CUDA_TOOLKIT;
    m.attr("SUM_TILE") = kSumTile;
}

}  // namespace
}  // namespace infinity::adam::cuda
