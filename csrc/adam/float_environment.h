// Sets rounding to nearest and gradual underflow for one scope, regardless of the calling thread's settings (threads
// inherit a user's torch.set_flush_denormal(True)). Required for bit-identical results on any thread.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace infinity::adam {

class FloatEnvironment {
  public:
    FloatEnvironment(const FloatEnvironment&) = delete;
    FloatEnvironment& operator=(const FloatEnvironment&) = delete;

#if defined(__x86_64__)
    FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80u); }
    ~FloatEnvironment() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#else
    FloatEnvironment() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~FloatEnvironment() { std::fesetenv(&saved_); }

  private:
    std::fenv_t saved_;
#endif
};

}  // namespace infinity::adam
