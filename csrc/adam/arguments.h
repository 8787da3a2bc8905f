// From Python values to checked C++ values. Whatever is wrong is a ValueError that says what to do.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "types.h"

namespace infinity::adam {

// Any Python integer (or object with __index__) that is a count of elements.
std::size_t to_count(const pybind11::object& value);
std::int64_t to_step(const pybind11::object& value);
int to_threads(const pybind11::object& value);
Format to_format(const std::string& name);
Rule to_rule(const std::string& name);
Moments to_moments(const std::string& name);
DType to_dtype(const char* argument, const std::string& name);

// Finite, also after rounding to fp32.
void check_finite(const char* name, double value);
void check_not_negative(const char* name, double value);  // and finite
void check_beta(const char* name, double value);

template <class T>
T* pointer(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// The arrays of one call: each address aligned to its element, inside the address space, apart from the others.
class ArrayChecks {
  public:
    explicit ArrayChecks(std::size_t n) : n_(n) {}
    // Returns the address. With n == 0 anything is accepted, since empty tensors have no address.
    std::uintptr_t add(const char* name, const pybind11::object& address, std::size_t element) {
        return add(name, address, element, n_);
    }
    std::uintptr_t add(const char* name, const pybind11::object& address, std::size_t element, std::size_t count);

  private:
    struct Range {
        const char* name;
        std::uintptr_t begin, end;
    };
    std::size_t n_;
    std::vector<Range> ranges_;
};

}  // namespace infinity::adam
