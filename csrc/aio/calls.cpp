#include "calls.h"

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef INFINITY_LIBAIO
// libaio and the kernel's header use the same name for two structs of the same layout.
#define iocb libaio_iocb
#define io_event libaio_io_event
#include <libaio.h>
#undef iocb
#undef io_event
static_assert(sizeof(libaio_iocb) == sizeof(iocb) && sizeof(libaio_io_event) == sizeof(io_event));
static_assert(sizeof(io_context_t) == sizeof(aio_context_t), "libaio's context is the kernel's, as a pointer");
#endif

namespace infinity::aio {
namespace {

int result_of(long returned) { return static_cast<int>(returned < 0 ? -errno : returned); }

int kernel_setup(unsigned events, aio_context_t* context) { return result_of(syscall(SYS_io_setup, events, context)); }

int kernel_submit(aio_context_t context, long count, iocb** blocks) {
    return result_of(syscall(SYS_io_submit, context, count, blocks));
}

int kernel_getevents(aio_context_t context, long min, long max, io_event* events, timespec* timeout) {
    return result_of(syscall(SYS_io_getevents, context, min, max, events, timeout));
}

int kernel_destroy(aio_context_t context) { return result_of(syscall(SYS_io_destroy, context)); }

#ifdef INFINITY_LIBAIO
io_context_t as_libaio(aio_context_t context) { return reinterpret_cast<io_context_t>(context); }

int libaio_setup(unsigned events, aio_context_t* context) {
    io_context_t created = nullptr;
    const int result = ::io_setup(static_cast<int>(events), &created);
    *context = reinterpret_cast<aio_context_t>(created);
    return result;
}

int libaio_submit(aio_context_t context, long count, iocb** blocks) {
    return ::io_submit(as_libaio(context), count, reinterpret_cast<libaio_iocb**>(blocks));
}

int libaio_getevents(aio_context_t context, long min, long max, io_event* events, timespec* timeout) {
    return ::io_getevents(as_libaio(context), min, max, reinterpret_cast<libaio_io_event*>(events), timeout);
}

int libaio_destroy(aio_context_t context) { return ::io_destroy(as_libaio(context)); }
#endif

}  // namespace

const Calls kKernelCalls{kernel_setup, kernel_submit, kernel_getevents, kernel_destroy};
#ifdef INFINITY_LIBAIO
const Calls kLibaioCalls{libaio_setup, libaio_submit, libaio_getevents, libaio_destroy};
#endif

}  // namespace infinity::aio
