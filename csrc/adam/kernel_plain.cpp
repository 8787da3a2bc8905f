// Plain C++, one element at a time: runs on every machine, and is the reference for the other kernels. On hardware with
// a fused multiply-add in its base instruction set (Arm) the compiler vectorizes it.
#include "plain.h"

#include "dispatch.h"
#include "kernel.h"

namespace infinity::adam {
namespace {

constexpr Kernels kTable = make_kernels<Plain, Plain, Plain, Plain>();

}  // namespace

const Kernels& kernels_plain() { return kTable; }

}  // namespace infinity::adam
