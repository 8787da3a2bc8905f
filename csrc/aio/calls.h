// Tables of the four calls of Linux AIO: one through libaio, one through the kernel's ABI.
//
// All functions return a negative errno on failure and do not set `errno` (libaio's convention).
#pragma once

#include <linux/aio_abi.h>
#include <time.h>

namespace infinity::aio {

struct Calls {
    int (*setup)(unsigned events, aio_context_t* context);
    int (*submit)(aio_context_t context, long count, iocb** blocks);
    int (*getevents)(aio_context_t context, long min, long max, io_event* events, timespec* timeout);
    int (*destroy)(aio_context_t context);
};

extern const Calls kKernelCalls;
#ifdef INFINITY_LIBAIO
extern const Calls kLibaioCalls;
#endif

}  // namespace infinity::aio
