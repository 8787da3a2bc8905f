// The four calls of Linux AIO behind one table of functions.
//
// The table is the seam of this engine: libaio fills it, the kernel's own ABI fills it, and the tests fill it with
// faults. All functions return a negative errno on failure and never touch `errno` (libaio's convention).
#pragma once

#include <linux/aio_abi.h>
#include <time.h>

#include <string_view>
#include <vector>

namespace infinity::aio {

struct Calls {
    const char* name;  // what `Engine.backend` says
    int (*setup)(unsigned events, aio_context_t* context);
    int (*submit)(aio_context_t context, long count, iocb** blocks);
    int (*getevents)(aio_context_t context, long min, long max, io_event* events, timespec* timeout);
    int (*destroy)(aio_context_t context);
    // How many EINTRs, or EAGAINs with waits of 1 to 10 ms, in a row are borne before they are reported.
    unsigned patience;
};

// Everything this build can use, best first; never empty.
const std::vector<const Calls*>& available_calls();

// The table named `name`, or the best one when `name` is empty. Throws std::invalid_argument for a name that is not
// there.
const Calls& find_calls(std::string_view name);

}  // namespace infinity::aio
