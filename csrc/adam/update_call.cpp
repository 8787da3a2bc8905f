#include "update_call.h"

#include <iterator>

#include "arguments.h"
#include "rules.h"

namespace py = pybind11;

namespace infinity::adam {
namespace {

constexpr const char* kMomentNames[] = {"moments[0]", "moments[1]", "moments[2]"};
constexpr const char* kScaleNames[] = {"scales[0]", "scales[1]", "scales[2]"};
static_assert(std::size(kMomentNames) == kMostMoments && std::size(kScaleNames) == kMostMoments);

// Returns the place of a constant of the rule; row.count if it has none of this name.
std::size_t place_of(const RuleRow& row, const std::string& name) {
    std::size_t place = 0;
    while (place < row.count && name != row.constants[place].name) ++place;
    return place;
}

void check_hyper(const Hyper& h) {
    const RuleRow& row = row_of(h.rule);
    for (std::size_t i = 0; i < row.count; ++i) {
        const Constant& constant = row.constants[i];
        switch (constant.range) {
            case Range::kNotNegative:
                check_not_negative(constant.name, h.constants[i]);
                break;
            case Range::kBeta:
                check_beta(constant.name, h.constants[i]);
                break;
            case Range::kFinite:
                check_finite(constant.name, h.constants[i]);
                break;
        }
    }
    const double lr = h.constants[place_of(row, "lr")], decay = h.constants[place_of(row, "weight_decay")];
    check_finite("lr * weight_decay", lr * decay);
    if (h.random.first % kBlock != 0) {
        throw py::value_error("first is " + std::to_string(h.random.first) +
                              ": arrays start at a block, so pass a multiple of " + std::to_string(kBlock));
    }
}

// Raises TypeError for a name that is no constant of any rule.
void check_known(const py::kwargs& constants) {
    for (const auto& [key, value] : constants) {
        const std::string name = py::str(key);
        bool known = false;
        for (const RuleRow& row : Rules::kRows) known = known || place_of(row, name) < row.count;
        if (!known) throw py::type_error(name + " is no argument: pass constants of the rule");
    }
}

Arrays to_arrays(const UpdateNames& names, const UpdateArrays& addresses, Rule rule, Format format, std::size_t n) {
    Arrays arrays{};
    arrays.grad_dtype = to_dtype("grad_dtype", names.grad_dtype);
    arrays.moments = to_moments(names.moment_format);
    ArrayChecks checks(n);
    arrays.param = pointer<void>(checks.add("param", addresses.param, format == Format::kFp32 ? 4 : 2));
    if (format != Format::kFp32) {
        arrays.master = pointer<void>(checks.add("master", addresses.master, format == Format::kRemainder ? 2 : 4));
    }
    arrays.grad = pointer<const void>(checks.add("grad", addresses.grad, arrays.grad_dtype == DType::kFp32 ? 4 : 2));
    const std::size_t count = row_of(rule).moments;
    const bool eight = arrays.moments == Moments::kEight;
    if (addresses.moments.size() != count || addresses.scales.size() != (eight ? count : 0)) {
        throw py::value_error(std::string(row_of(rule).name) + " with moments of " + names.moment_format + " takes " +
                              std::to_string(count) + " moments and " + std::to_string(eight ? count : 0) +
                              " scales, not " + std::to_string(addresses.moments.size()) + " and " +
                              std::to_string(addresses.scales.size()));
    }
    const std::size_t width = eight ? 1 : arrays.moments == Moments::kBf16 ? 2 : 4;
    for (std::size_t k = 0; k < count; ++k) {
        arrays.moment[k] = pointer<void>(checks.add(kMomentNames[k], addresses.moments[k], width));
        if (!eight) continue;
        const std::size_t blocks = (n + kBlock - 1) / kBlock;
        arrays.scale[k] = pointer<std::uint8_t>(checks.add(kScaleNames[k], addresses.scales[k], 1, blocks));
    }
    arrays.from.param = arrays.param;
    arrays.from.master = arrays.master;
    for (std::size_t k = 0; k < count; ++k) {
        arrays.from.moment[k] = arrays.moment[k];
        arrays.from.scale[k] = arrays.scale[k];
    }
    return arrays;
}

}  // namespace

Sources to_sources(const UpdateCall& call, const std::vector<py::object>& addresses) {
    const bool eight = call.arrays.moments == Moments::kEight;
    const std::size_t count = row_of(call.rule).moments, wanted = 2 + (eight ? 2 : 1) * count;
    if (addresses.size() != wanted) {
        throw py::value_error("sources has " + std::to_string(addresses.size()) + " addresses: pass " +
                              std::to_string(wanted) + ", of param, master, moments and scales");
    }
    Sources sources{};
    ArrayChecks checks(call.n);
    sources.param = pointer<const void>(checks.add("sources[0]", addresses[0], call.format == Format::kFp32 ? 4 : 2));
    if (call.format != Format::kFp32) {
        const std::size_t width = call.format == Format::kRemainder ? 2 : 4;
        sources.master = pointer<const void>(checks.add("sources[1]", addresses[1], width));
    }
    const std::size_t width = eight ? 1 : call.arrays.moments == Moments::kBf16 ? 2 : 4;
    for (std::size_t k = 0; k < count; ++k) {
        sources.moment[k] = pointer<const void>(checks.add("a source of moments", addresses[2 + k], width));
        if (!eight) continue;
        const std::size_t blocks = (call.n + kBlock - 1) / kBlock;
        sources.scale[k] =
            pointer<const std::uint8_t>(checks.add("a source of scales", addresses[2 + count + k], 1, blocks));
    }
    return sources;
}

Hyper to_hyper(const std::string& rule, const py::kwargs& constants, double grad_scale) {
    Hyper hyper{};
    hyper.rule = to_rule(rule);
    hyper.grad_scale = grad_scale;
    const RuleRow& row = row_of(hyper.rule);
    std::size_t found = 0;
    for (std::size_t i = 0; i < row.count; ++i) {
        PyObject* const value = PyDict_GetItemString(constants.ptr(), row.constants[i].name);
        if (value == nullptr) throw py::type_error(rule + " needs " + row.constants[i].name + ": pass it");
        hyper.constants[i] = PyFloat_AsDouble(value);
        if (hyper.constants[i] == -1.0 && PyErr_Occurred() != nullptr) throw py::error_already_set();
        ++found;
    }
    if (found < constants.size()) check_known(constants);
    return hyper;
}

UpdateCall to_update_call(const UpdateNames& names, const UpdateArrays& addresses, Hyper hyper,
                          const py::object& step) {
    check_hyper(hyper);
    hyper.step = to_step(step);
    const Format format = to_format(names.format);
    const std::size_t n = to_count(addresses.n);
    const Arrays arrays = to_arrays(names, addresses, hyper.rule, format, n);
    hyper.rule = effective_rule(hyper);
    return {format, hyper.rule, arrays, make_coefficients(hyper), n};
}

}  // namespace infinity::adam
