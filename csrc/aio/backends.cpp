#include <stdexcept>
#include <string>

#include "aio_queue.h"
#include "queue.h"
#ifdef INFINITY_IO_URING
#include "uring_queue.h"
#endif

namespace infinity::aio {

const std::vector<Backend>& available_backends() {
    static const std::vector<Backend> backends{
#ifdef INFINITY_LIBAIO
        {INFINITY_LIBAIO,
         [](unsigned depth) -> std::unique_ptr<Queue> { return std::make_unique<AioQueue>(kLibaioCalls, depth); },
         &AioQueue::explain},
#endif
        {"kernel aio",
         [](unsigned depth) -> std::unique_ptr<Queue> { return std::make_unique<AioQueue>(kKernelCalls, depth); },
         &AioQueue::explain},
#ifdef INFINITY_IO_URING
        {"io_uring", [](unsigned depth) -> std::unique_ptr<Queue> { return std::make_unique<UringQueue>(depth); },
         &UringQueue::explain},
#endif
    };
    return backends;
}

const Backend& find_backend(std::string_view name) {
    std::string names;
    for (const Backend& backend : available_backends()) {
        if (name.empty() || name == backend.name) return backend;
        names += std::string(names.empty() ? "'" : ", '") + backend.name + "'";
    }
    throw std::invalid_argument("no AIO backend is called '" + std::string(name) + "'; this build has " + names);
}

}  // namespace infinity::aio
