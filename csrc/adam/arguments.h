// Converts Python values to validated C++ values. Invalid values raise ValueError with the fix.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "types.h"

namespace infinity::adam {

// Converts a Python integer (or an object with __index__) to a number of elements.
std::size_t to_count(const pybind11::object& value);
std::int64_t to_step(const pybind11::object& value);
int to_threads(const pybind11::object& value);
Format to_format(const std::string& name);
Rule to_rule(const std::string& name);
Moments to_moments(const std::string& name);
DType to_dtype(const char* argument, const std::string& name);

// Requires a finite value, also after rounding to fp32.
void check_finite(const char* name, double value);
void check_not_negative(const char* name, double value);  // requires a finite value, too
void check_beta(const char* name, double value);

template <class T>
T* pointer(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Checks the arrays of one call: aligned to their elements, inside the address space, without overlap.
class ArrayChecks {
  public:
    explicit ArrayChecks(std::size_t n) : n_(n) {}
    // Returns the address. Accepts any address if n == 0, since empty tensors have none.
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
