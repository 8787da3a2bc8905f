// Python arguments of the kernels of frozen.h, as the modules for the CPU and for CUDA take them.
#pragma once

#include <algorithm>

#include "arguments.h"
#include "frozen.h"

namespace infinity::adam {

inline Code to_code(const std::string& name) {
    if (name == "8bit") return Code::kEight;
    if (name == "nf4") return Code::kNf4;
    throw pybind11::value_error("code is '" + name + "': pass '8bit' or 'nf4'");
}

// Returns a number of elements that is a multiple of a record's.
inline std::size_t to_records(const pybind11::object& n) {
    const std::size_t count = to_count(n);
    if (count % kRecord != 0) {
        throw pybind11::value_error("n is " + std::to_string(count) + ": pass a multiple of " +
                                    std::to_string(kRecord));
    }
    return count;
}

struct FrozenArrays {
    const std::uint8_t* records;
    void* values;
};

// Checks arrays that share no memory, or of which records end where values end if they may be decoded `in_place`.
inline FrozenArrays to_frozen_arrays(const pybind11::object& records, const pybind11::object& values, std::size_t n,
                                     Code code, DType dtype, bool in_place, std::size_t alignment = 1) {
    const std::size_t nbytes = n / kRecord * record_bytes(code, dtype), width = width_of(dtype);
    ArrayChecks alone(n), other(n), both(n);
    const std::uintptr_t from = alone.add("records", records, alignment, nbytes / alignment);
    const std::uintptr_t to =
        other.add("values", values, std::max(alignment, width), n * width / std::max(alignment, width));
    if (!in_place || from + nbytes != to + n * width) {
        both.add("records", records, 1, nbytes);
        both.add("values", values, width, n);
    }
    return {pointer<const std::uint8_t>(from), pointer<void>(to)};
}

}  // namespace infinity::adam
