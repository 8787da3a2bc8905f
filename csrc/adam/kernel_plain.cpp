// Plain C++: runs everywhere, and is the oracle of the others. One element at a time; on hardware with a fused
// multiply-add in its base instruction set (Arm) the compiler vectorises it.
#include "plain.h"

#include "dispatch.h"
#include "kernel.h"

namespace infinity::adam {
namespace {

constexpr Kernels kTable = make_kernels<Plain, Plain>();

}  // namespace

const Kernels& kernels_plain() { return kTable; }

}  // namespace infinity::adam
