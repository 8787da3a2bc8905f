#include "arguments.h"

#include <cmath>
#include <limits>

#include "rules.h"

namespace py = pybind11;

namespace infinity::adam {
namespace {

std::string text(const py::handle& value) { return py::str(value); }

[[noreturn]] void refuse(const std::string& what) { throw py::value_error(what); }

// Raises ValueError with `complaint` outside of [0, 2^63), and TypeError for other types.
std::int64_t to_integer(const char* name, const py::object& value, const char* complaint) {
    const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
    if (!index) {
        PyErr_Clear();
        throw py::type_error(std::string(name) + " must be an integer, not " + text(py::type::of(value)));
    }
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (overflow != 0 || number < 0) refuse(std::string(name) + " is " + text(index) + ": " + complaint);
    return number;
}

}  // namespace

std::size_t to_count(const py::object& value) {
    constexpr std::int64_t kMost = std::int64_t{1} << 58;  // so that byte counts cannot overflow
    const std::int64_t n = to_integer("n", value, "pass the number of elements, 0 or more");
    if (n > kMost) refuse("n is " + std::to_string(n) + ": no address space holds so many elements");
    return static_cast<std::size_t>(n);
}

std::int64_t to_step(const py::object& value) {
    const char* complaint = "pass the number of this optimizer step, counting from 1";
    const std::int64_t step = to_integer("step", value, complaint);
    if (step < 1) refuse(std::string("step is 0: ") + complaint);
    return step;
}

int to_threads(const py::object& value) {
    constexpr std::int64_t kMost = 1024;
    const char* complaint = "pass 1 to 1024, or 0 for one per processor that this process may use";
    const std::int64_t threads = to_integer("threads", value, complaint);
    if (threads > kMost) refuse("threads is " + std::to_string(threads) + ": " + complaint);
    return static_cast<int>(threads);
}

Format to_format(const std::string& name) {
    if (name == "fp32") return Format::kFp32;
    if (name == "remainder") return Format::kRemainder;
    if (name == "master") return Format::kMaster;
    if (name == "master_fp16") return Format::kMasterFp16;
    refuse("format is '" + name + "': pass 'fp32', 'remainder', 'master' or 'master_fp16'");
}

Rule to_rule(const std::string& name) {
    std::string known;
    for (std::size_t i = 0; i < kRules; ++i) {
        if (name == Rules::kRows[i].name) return static_cast<Rule>(i);
        known += (i == 0 ? "'" : i + 1 == kRules ? " or '" : ", '") + std::string(Rules::kRows[i].name) + "'";
    }
    refuse("rule is '" + name + "': pass " + known);
}

Moments to_moments(const std::string& name) {
    if (name == "fp32") return Moments::kFp32;
    if (name == "bf16") return Moments::kBf16;
    if (name == "8bit") return Moments::kEight;
    refuse("moment_format is '" + name + "': pass 'fp32', 'bf16' or '8bit'");
}

DType to_dtype(const char* argument, const std::string& name) {
    if (name == "fp32") return DType::kFp32;
    if (name == "bf16") return DType::kBf16;
    if (name == "fp16") return DType::kFp16;
    refuse(std::string(argument) + " is '" + name + "': pass 'fp32', 'bf16' or 'fp16'");
}

void check_finite(const char* name, double value) {
    if (!(std::fabs(value) <= static_cast<double>(std::numeric_limits<float>::max()))) {
        refuse(std::string(name) + " is " + std::to_string(value) + ": pass a finite number within fp32's range");
    }
}

void check_not_negative(const char* name, double value) {
    check_finite(name, value);
    if (value < 0) refuse(std::string(name) + " is " + std::to_string(value) + ": pass 0 or more");
}

void check_beta(const char* name, double value) {
    if (!(value >= 0.0 && value < 1.0)) {
        refuse(std::string(name) + " is " + std::to_string(value) + ": pass a number in [0, 1)");
    }
}

std::uintptr_t ArrayChecks::add(const char* name, const py::object& address, std::size_t element, std::size_t count) {
    const char* complaint = "pass the address of an array, such as tensor.data_ptr()";
    const auto begin = static_cast<std::uintptr_t>(to_integer(name, address, complaint));
    if (n_ == 0) return begin;
    const auto hex = [&] {
        return text(py::module_::import("builtins").attr("hex")(begin));
    };  // slow, so only for errors
    if (begin == 0) refuse(std::string(name) + " is a null address: " + complaint);
    if (begin % element != 0) {
        refuse(std::string(name) + " at " + hex() + " is not aligned to its " + std::to_string(element) +
               "-byte elements: pass the address of an element");
    }
    const std::uintptr_t end = begin + count * element;
    if (end < begin || end > static_cast<std::uintptr_t>(std::numeric_limits<std::int64_t>::max())) {
        refuse(std::string(name) + " at " + hex() + " with n = " + std::to_string(n_) +
               " elements ends beyond the address space: check n");
    }
    for (const Range& other : ranges_) {
        if (begin < other.end && other.begin < end) {
            refuse(std::string(name) + " overlaps " + other.name + ": pass arrays that share no memory");
        }
    }
    ranges_.push_back({name, begin, end});
    return begin;
}

}  // namespace infinity::adam
