// The C++ sources of the module in one translation unit, which compiles faster.
#include "../../../csrc/adam/arguments.cpp"
#include "../../../csrc/adam/coefficients.cpp"
#include "../../../csrc/adam/cuda/bindings.cpp"
#include "../../../csrc/adam/update_call.cpp"
