#include "coefficients.h"

#include <cstring>
#include <new>

#include "float_environment.h"
#include "rules.h"

namespace infinity::adam {
namespace {

template <class R>
void construct(const Hyper& h, const CallNumbers& call, void* rule) {
    typename R::Given given;
    std::memcpy(&given, h.constants, sizeof given);
    new (rule) R(given, call);
}

template <class... R>
void construct(const Hyper& h, const CallNumbers& call, void* rule, ListOf<R...>) {
    constexpr void (*constructors[])(const Hyper&, const CallNumbers&, void*) = {construct<R>...};
    constructors[static_cast<std::size_t>(h.rule)](h, call, rule);
}

// Not inlined, since the compiler may move arithmetic across a change of the floating-point environment.
[[gnu::noinline]] Coefficients compute_coefficients(const Hyper& h) {
    Coefficients c{};
    c.random = h.random;
    construct(h, {h.grad_scale, static_cast<double>(h.step)}, c.rule, Rules{});
    return c;
}

}  // namespace

Coefficients make_coefficients(const Hyper& hyper) {
    const FloatEnvironment environment;
    return compute_coefficients(hyper);
}

Rule effective_rule(const Hyper& h) {
    if (h.rule != number_of<RuleAdam<false>>(Rules{})) return h.rule;
    RuleAdam<false>::Given given;
    std::memcpy(&given, h.constants, sizeof given);
    return given.weight_decay == 0.0 ? number_of<RuleAdam<true>>(Rules{}) : h.rule;
}

}  // namespace infinity::adam
