// Bindings of the kernels of frozen.h. Documented in infinity/native/_adam.pyi.
#include "frozen_bindings.h"

#include <cstring>

#include "dispatch.h"
#include "frozen_arguments.h"

namespace py = pybind11;
using namespace py::literals;

namespace infinity::adam {
namespace {

const FrozenKernels& frozen_of(const Kernels& kernels) {
#ifdef INFINITY_ADAM_X86
    if (&kernels == &kernels_avx512()) return frozen_avx512();
    if (&kernels == &kernels_avx2()) return frozen_avx2();
#endif
    return frozen_plain();
}

}  // namespace

void def_frozen(py::module_& m, const Kernels& (*to_kernels)(const std::string& isa)) {
    m.def(
        "encode_frozen",
        [to_kernels](const py::object& values, const py::object& records, const py::object& n, const std::string& code,
                     const std::string& dtype, const py::object& threads, const std::string& isa) {
            const Code to = to_code(code);
            const DType of = to_dtype("dtype", dtype);
            const FrozenKernels& kernels = frozen_of(to_kernels(isa));
            const std::size_t count = to_records(n);
            const int workers = to_threads(threads);
            const FrozenArrays arrays = to_frozen_arrays(records, values, count, to, of, false);
            const py::gil_scoped_release release;
            return encode(kernels, to, of, arrays.values, const_cast<std::uint8_t*>(arrays.records), count, workers);
        },
        "values"_a, "records"_a, "n"_a, py::kw_only(), "code"_a, "dtype"_a, "threads"_a = 0, "isa"_a = "auto",
        "Encode frozen parameters; return the number of the first value that is not finite, or n.");
    m.def(
        "decode_frozen",
        [to_kernels](const py::object& records, const py::object& values, const py::object& n, const std::string& code,
                     const std::string& dtype, const py::object& threads, const std::string& isa) {
            const Code from = to_code(code);
            const DType of = to_dtype("dtype", dtype);
            const Kernels& kernels = to_kernels(isa);
            const std::size_t count = to_records(n);
            const int workers = to_threads(threads);
            const FrozenArrays arrays = to_frozen_arrays(records, values, count, from, of, true);
            const py::gil_scoped_release release;
            return decode(frozen_of(kernels), kernels.fingerprint, from, of, arrays.records, arrays.values, count,
                          workers);
        },
        "records"_a, "values"_a, "n"_a, py::kw_only(), "code"_a, "dtype"_a, "threads"_a = 0, "isa"_a = "auto",
        "Decode frozen parameters and return their fingerprint.");
    m.attr("FROZEN_GROUP") = kGroup;
    m.attr("FROZEN_RECORD") = kRecord;
}

}  // namespace infinity::adam
