// The instruction sets that this build contains and this machine supports.
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

// Fastest first; "plain" is always present and last. Determined once.
const std::vector<Isa>& available_isas();

}  // namespace infinity::adam
