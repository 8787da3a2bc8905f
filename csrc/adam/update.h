// The update with 16- or 32-bit moments. Included by kernel.h, whose rules apply.
#pragma once

#include <cstring>

#include "formats.h"

namespace infinity::adam {
namespace {

constexpr std::size_t min(std::size_t a, std::size_t b) { return a < b ? a : b; }

// Every rule adds to the parameter a function of its new moments, so a NaN in one of them shows in the parameter.
template <class V, class F, class M, class R>
inline void update_vector(const Arrays& a, const R& rule, std::size_t i, typename V::Int random) {
    typename V::Float p = F::load(a, i);
    typename V::Float m = M::load(a.from.moment[0], i), v = R::kMoments == 2 ? M::load(a.from.moment[1], i) : m;
    rule(p, load_grad<V>(a.grad_dtype, a.grad, i), m, v);
    if (__builtin_expect(V::any_nan(p), false)) {
        p = V::canonical(p);
        m = V::canonical(m);
        v = V::canonical(v);
    }
    F::store(a, i, p);
    M::template store<0>(a.moment[0], i, m, random);
    if constexpr (R::kMoments == 2) M::template store<1>(a.moment[1], i, v, random);
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
        for (int k = 0; k < moments; ++k)
            std::memcpy(moment_[k], at(a.from.moment[k], moment_bytes), count * moment_bytes);
        arrays = a;
        arrays.param = param_;
        arrays.master = master_;
        arrays.grad = grad_;
        arrays.moment[0] = moment_[0];
        arrays.moment[1] = moment_[1];
        arrays.from = {param_, master_, {moment_[0], moment_[1]}, {}};
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
                      moment_[2][V::kWidth] = {};
};

template <class V, class F, class M, class R>
[[gnu::flatten]] void update_plainly(const Arrays& arrays, const Coefficients& c, std::size_t begin, std::size_t end) {
    const Arrays a = arrays;  // a copy whose address nobody takes: its pointers stay in registers
    const R rule(c);
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
