// The update with 16- or 32-bit moments. Included by kernel.h, whose rules apply.
#pragma once

#include <cstring>

#include "formats.h"
#include "rules.h"

namespace infinity::adam {
namespace {

constexpr std::size_t min(std::size_t a, std::size_t b) { return a < b ? a : b; }

template <int k>
struct Number {
    static constexpr int value = k;
};
// Calls body(Number<0>()), ..., body(Number<count - 1>()): a loop whose index is a constant.
template <int count, class Body>
inline void each(const Body& body) {
    if constexpr (count > 0) {
        each<count - 1>(body);
        body(Number<count - 1>());
    }
}

template <class V, class F, class M, class R>
inline void update_vector(const Arrays& a, const R& rule, std::size_t i, typename V::Int random) {
    typename V::Float p = F::load(a, i), m[R::kMoments];
    each<R::kMoments>([&](auto k) { m[k.value] = M::load(a.from.moment[k.value], i); });
    rule.template update<V, false>(p, load_grad<V>(a.grad_dtype, a.grad, i), m);
    if (__builtin_expect(V::any_nan(p), false)) {  // a NaN in a moment shows in the parameter
        p = V::canonical(p);
        each<R::kMoments>([&](auto k) { m[k.value] = V::canonical(m[k.value]); });
    }
    F::store(a, i, p);
    each<R::kMoments>([&](auto k) { M::template store<k.value>(a.moment[k.value], i, m[k.value], random); });
}

// A zero-padded copy of fewer elements than a vector, so that memory beyond the arrays is not accessed.
template <class V, class F, std::size_t moment_bytes>
class Staged {
  public:
    Staged(const Arrays& a, std::size_t begin, std::size_t count, int moments)
        : from_(a), begin_(begin), count_(count), moments_(moments) {
        std::memcpy(param_, at(a.from.param, kParam), count * kParam);
        if constexpr (F::kMasterBytes != 0)
            std::memcpy(master_, at(a.from.master, F::kMasterBytes), count * F::kMasterBytes);
        const std::size_t grad = grad_bytes(a.grad_dtype);
        std::memcpy(grad_, at(a.grad, grad), count * grad);
        arrays = a;
        arrays.from.param = arrays.param = param_;
        arrays.from.master = arrays.master = master_;
        arrays.grad = grad_;
        for (int k = 0; k < moments; ++k) {
            std::memcpy(moment_[k], at(a.from.moment[k], moment_bytes), count * moment_bytes);
            arrays.from.moment[k] = arrays.moment[k] = moment_[k];
        }
    }
    void put_back() const {
        std::memcpy(at(from_.param, kParam), param_, count_ * kParam);
        if constexpr (F::kMasterBytes != 0) {
            std::memcpy(at(from_.master, F::kMasterBytes), master_, count_ * F::kMasterBytes);
        }
        for (int k = 0; k < moments_; ++k) {
            std::memcpy(at(from_.moment[k], moment_bytes), moment_[k], count_ * moment_bytes);
        }
    }
    Arrays arrays;

  private:
    static constexpr std::size_t kParam = sizeof(typename F::Param);
    char* at(void* array, std::size_t width) const { return static_cast<char*>(array) + begin_ * width; }
    const char* at(const void* array, std::size_t width) const {
        return static_cast<const char*>(array) + begin_ * width;
    }

    const Arrays& from_;
    std::size_t begin_, count_;
    int moments_;
    alignas(64) float param_[V::kWidth] = {}, master_[V::kWidth] = {}, grad_[V::kWidth] = {},
                      moment_[kMostMoments][V::kWidth] = {};
};

template <class V, class F, class M, class R>
[[gnu::flatten]] void update_plainly(const Arrays& arrays, const Coefficients& c, std::size_t begin, std::size_t end) {
    const Arrays a = arrays;  // a copy whose address nobody takes: its pointers stay in registers
    const R rule = rule_in<R>(c);
    for (std::size_t at = begin, stop = begin; at < end; at = stop) {
        stop = at + min(end - at, (std::size_t{1} << 32) - static_cast<std::uint32_t>(c.random.first + at));
        const ElementRandom<V> element_random(c.random, at);
        std::size_t i = at;
        for (; i + V::kWidth <= stop; i += V::kWidth) {
            update_vector<V, F, M>(a, rule, i, M::random(element_random, i - at));
        }
        if constexpr (V::kWidth > 1) {
            if (i == stop) continue;
            Staged<V, F, M::kBytes> rest(arrays, i, stop - i, R::kMoments);
            update_vector<V, F, M>(rest.arrays, rule, 0, M::random(element_random, i - at));
            rest.put_back();
        }
    }
    V::end_stores();
}

}  // namespace
}  // namespace infinity::adam
