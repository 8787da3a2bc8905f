#include "context.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
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

std::system_error setup_error(int error) {
    std::string what = "cannot set up asynchronous I/O (io_setup)";
    if (error == EAGAIN) {
        what += ": the system's AIO slots are used up (fs.aio-nr is " + number_in("/proc/sys/fs/aio-nr") + " of " +
                number_in("/proc/sys/fs/aio-max-nr") + "); raise fs.aio-max-nr with sysctl, or end what uses them";
    } else if (error == ENOSYS || error == EPERM) {
        what += ": this kernel, or the container's system call filter, does not allow AIO";
    }
    return std::system_error(error, std::generic_category(), what);
}

}  // namespace

Context::Context(const Calls& calls, unsigned depth) : calls_(calls), depth_(depth) {
    int result = 0;
    while ((result = calls_.setup(depth_, &context_)) == -EAGAIN && depth_ > 1) depth_ /= 2;
    if (result < 0) throw setup_error(-result);
    alive_ = true;
    event_fd_ = eventfd(0, EFD_CLOEXEC);
    if (event_fd_ < 0) {
        const int error = errno;
        calls_.destroy(context_);
        throw std::system_error(error, std::generic_category(), "cannot create an eventfd for asynchronous I/O");
    }
}

Context::~Context() {
    destroy();
    close(event_fd_);
}

void Context::destroy() {
    if (!alive_) return;
    alive_ = false;
    calls_.destroy(context_);
}

void Context::attach(iocb& block) const {
    block.aio_flags |= IOCB_FLAG_RESFD;
    block.aio_resfd = static_cast<uint32_t>(event_fd_);
}

int Context::submit(std::span<iocb*> blocks) const {
    return alive_ ? calls_.submit(context_, static_cast<long>(blocks.size()), blocks.data()) : -EBADF;
}

int Context::reap(std::span<io_event> events) const {
    timespec now{0, 0};
    return alive_ ? calls_.getevents(context_, 0, static_cast<long>(events.size()), events.data(), &now) : 0;
}

void Context::sleep() const {
    uint64_t count = 0;
    while (read(event_fd_, &count, sizeof count) < 0 && errno == EINTR) {
    }
}

void Context::wake() const {
    const uint64_t one = 1;
    while (write(event_fd_, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

}  // namespace infinity::aio
