#include "aio_queue.h"

#include <errno.h>
#include <linux/fs.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>
#include <system_error>

namespace infinity::aio {
namespace {

std::string number_in(const char* path) {
    std::string text = "?";
    std::ifstream(path) >> text;
    return text;
}

}  // namespace

std::string AioQueue::explain(int error) {
    std::string what = "cannot set up asynchronous I/O (io_setup)";
    if (error == EAGAIN) {
        what += ": the system's AIO slots are used up (fs.aio-nr is " + number_in("/proc/sys/fs/aio-nr") + " of " +
                number_in("/proc/sys/fs/aio-max-nr") +
                "); raise fs.aio-max-nr with sysctl, or end processes that use AIO";
    } else if (error == EMFILE || error == ENFILE) {
        what += ": too many files are open; raise the limit (ulimit -n)";
    } else if (error == ENOSYS || error == EPERM) {
        what += ": this kernel, or the container's system call filter, does not allow AIO";
    }
    return what;
}

AioQueue::AioQueue(const Calls& calls, unsigned depth) : calls_(calls), blocks_(depth), events_(depth) {
    batch_.reserve(depth);
    const int result = calls_.setup(depth, &context_);
    if (result < 0) throw std::system_error(-result, std::generic_category());
    event_fd_ = eventfd(0, EFD_CLOEXEC);
    if (event_fd_ < 0) {
        const int error = errno;
        calls_.destroy(context_);
        throw std::system_error(error, std::generic_category());
    }
    alive_ = true;
}

AioQueue::~AioQueue() {
    abandon(0);
    close(event_fd_);
}

iocb* AioQueue::describe(const Operation& operation) {
    iocb& block = blocks_[operation.index];
    std::memset(&block, 0, sizeof block);
    block.aio_data = reinterpret_cast<uint64_t>(&operation);
    block.aio_lio_opcode = operation.direction == Direction::kWrite ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    block.aio_fildes = static_cast<uint32_t>(operation.fd);
    block.aio_buf = operation.address;
    block.aio_nbytes = operation.bytes;
    block.aio_offset = static_cast<int64_t>(operation.offset);
    block.aio_flags = IOCB_FLAG_RESFD;
    block.aio_resfd = static_cast<uint32_t>(event_fd_);
    if (operation.durable) block.aio_rw_flags = RWF_DSYNC;
    return &block;
}

int AioQueue::submit(std::span<Operation* const> operations) {
    if (!alive_) return -EBADF;
    batch_.clear();
    for (const Operation* operation : operations) batch_.push_back(describe(*operation));
    return calls_.submit(context_, static_cast<long>(batch_.size()), batch_.data());
}

int AioQueue::reap(std::span<Completion> completions, bool wait) {
    uint64_t count = 0;
    while (wait && read(event_fd_, &count, sizeof count) < 0 && errno == EINTR) {
    }
    if (!alive_) return 0;
    timespec now{0, 0};
    const auto room = static_cast<long>(std::min(completions.size(), events_.size()));
    const int found = calls_.getevents(context_, 0, room, events_.data(), &now);
    for (int i = 0; i < found; ++i) {
        completions[static_cast<size_t>(i)] = {reinterpret_cast<Operation*>(events_[static_cast<size_t>(i)].data),
                                               events_[static_cast<size_t>(i)].res};
    }
    return found;
}

void AioQueue::wake() {
    const uint64_t one = 1;
    while (write(event_fd_, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

// io_destroy waits for the operations in flight.
void AioQueue::abandon(unsigned) {
    if (!alive_) return;
    alive_ = false;
    calls_.destroy(context_);
}

}  // namespace infinity::aio
