#include "dispatch.h"

#ifdef INFINITY_ADAM_X86
#include <cpuid.h>
#endif

namespace infinity::adam {
namespace {

#ifdef INFINITY_ADAM_X86
// Some compilers' __builtin_cpu_supports does not accept "f16c".
bool has_f16c() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

std::vector<Isa> find_isas() {
    std::vector<Isa> isas;
#ifdef INFINITY_ADAM_X86
    // __builtin_cpu_supports reads cpuid and, by xgetbv, whether the operating system saves the wide registers.
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512) isas.push_back({"avx512", &kernels_avx512()});
    if (avx2) isas.push_back({"avx2", &kernels_avx2()});
#endif
    isas.push_back({"plain", &kernels_plain()});
    return isas;
}

// Initialized before main, without a lock, so that a fork at any time leaves the child a usable table.
const std::vector<Isa> kIsas = find_isas();

}  // namespace

const std::vector<Isa>& available_isas() { return kIsas; }

}  // namespace infinity::adam
