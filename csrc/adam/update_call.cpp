#include "update_call.h"

#include "arguments.h"

namespace py = pybind11;

namespace infinity::adam {
namespace {

constexpr const char* kMomentNames[] = {"moments[0]", "moments[1]"};
constexpr const char* kScaleNames[] = {"scales[0]", "scales[1]"};

void check_hyper(const Hyper& h) {
    check_not_negative("lr", h.lr);
    check_beta("beta1", h.beta1);
    check_beta("beta2", h.beta2);
    check_not_negative("eps", h.eps);
    check_not_negative("weight_decay", h.weight_decay);
    check_finite("lr * weight_decay", h.lr * h.weight_decay);
    check_not_negative("momentum", h.momentum);
    check_finite("dampening", h.dampening);
    check_not_negative("lr_decay", h.lr_decay);
    if (h.random.first % kBlock != 0) {
        throw py::value_error("first is " + std::to_string(h.random.first) +
                              ": arrays start at a block, so pass a multiple of " + std::to_string(kBlock));
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
    const std::size_t count = moments_of(rule);
    const bool eight = arrays.moments == Moments::kEight;
    if (addresses.moments.size() != count || addresses.scales.size() != (eight ? count : 0)) {
        throw py::value_error(names.rule + " with moments of " + names.moment_format + " takes " +
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
    arrays.from = {
        arrays.param, arrays.master, {arrays.moment[0], arrays.moment[1]}, {arrays.scale[0], arrays.scale[1]}};
    return arrays;
}

}  // namespace

Sources to_sources(const UpdateCall& call, const std::vector<py::object>& addresses) {
    const bool eight = call.arrays.moments == Moments::kEight;
    const std::size_t count = moments_of(call.rule), wanted = 2 + (eight ? 2 : 1) * count;
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

UpdateCall to_update_call(const UpdateNames& names, const UpdateArrays& addresses, Hyper hyper,
                          const py::object& step) {
    check_hyper(hyper);
    hyper.rule = to_rule(names.rule);
    hyper.step = to_step(step);
    const Format format = to_format(names.format);
    const std::size_t n = to_count(addresses.n);
    const Arrays arrays = to_arrays(names, addresses, hyper.rule, format, n);
    return {format, effective_rule(hyper), arrays, make_coefficients(hyper), n};
}

}  // namespace infinity::adam
