#include "file.h"

#include <fcntl.h>

#include <stdexcept>
#include <utility>

namespace infinity::aio {

File::File(int direct_fd, int buffered_fd, std::string path, int64_t alignment)
    : direct_fd_(direct_fd < 0 ? -1 : direct_fd),
      buffered_fd_(buffered_fd),
      path_(std::move(path)),
      alignment_(static_cast<uint64_t>(alignment)) {
    if (buffered_fd < 0) {
        throw std::invalid_argument(
            "buffered_fd must be an open descriptor: unaligned edges and short transfers need it");
    }
    if (alignment < 512 || (alignment & (alignment - 1)) != 0) {
        throw std::invalid_argument("alignment is " + std::to_string(alignment) +
                                    "; it must be a power of two of at least 512");
    }
    // Advice only: a descriptor that takes none works as well.
    if (has_direct()) (void)posix_fadvise(buffered_fd_, 0, 0, POSIX_FADV_RANDOM);
}

}  // namespace infinity::aio
