// Which instruction sets this build holds and this machine can run.
#pragma once

#include <vector>

#include "types.h"

namespace infinity::adam {

const Kernels& kernels_plain();
const Kernels& kernels_avx2();    // only in builds for x86-64
const Kernels& kernels_avx512();  // likewise

struct Isa {
    const char* name;
    const Kernels* kernels;
};

// Fastest first; "plain" is always there and last. Asked of the processor and the operating system once.
const std::vector<Isa>& available_isas();

}  // namespace infinity::adam
