#include "uring_queue.h"

#include <errno.h>
#include <linux/fs.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <fstream>
#include <system_error>
#include <thread>
#include <utility>

namespace infinity::aio {
namespace {

constexpr unsigned kSlots = 1024;                // size of the buffer table; an empty slot costs 8 bytes
constexpr uint64_t kLargestBuffer = 1ULL << 30;  // the kernel's limit

int result_of(long returned) { return static_cast<int>(returned < 0 ? -errno : returned); }

int set_up(unsigned entries, io_uring_params& parameters) {
    return result_of(syscall(SYS_io_uring_setup, entries, &parameters));
}

int register_with(int ring, unsigned what, const void* argument, unsigned count) {
    return result_of(syscall(SYS_io_uring_register, ring, what, argument, count));
}

std::system_error error_of(int error) { return std::system_error(error, std::generic_category()); }

// Accesses to memory shared with the kernel, with release and acquire.
unsigned load(const unsigned* shared) {
    return std::atomic_ref(*const_cast<unsigned*>(shared)).load(std::memory_order_acquire);
}
void store(unsigned* shared, unsigned value) { std::atomic_ref(*shared).store(value, std::memory_order_release); }

// Flags of the cheapest ring that this kernel supports: completions are processed when the ring's thread reaps them,
// instead of interrupting it.
int open_ring(unsigned entries, io_uring_params& parameters) {
    constexpr unsigned kKinds[] = {
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_R_DISABLED,  // Linux 6.1
        IORING_SETUP_COOP_TASKRUN | IORING_SETUP_R_DISABLED,                                // Linux 5.19
        IORING_SETUP_R_DISABLED,                                                            // Linux 5.10
    };
    int ring = -EINVAL;
    for (const unsigned kind : kKinds) {
        parameters = {};
        parameters.flags = kind | IORING_SETUP_CLAMP;
        ring = set_up(entries, parameters);
        if (ring != -EINVAL) break;
    }
    return ring;
}

}  // namespace

Mapping::Mapping(int fd, uint64_t offset, size_t bytes) : bytes_(bytes) {
    start_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
    if (start_ == MAP_FAILED) {
        start_ = nullptr;
        throw error_of(errno);
    }
}

Mapping::Mapping(Mapping&& other) noexcept
    : start_(std::exchange(other.start_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
    std::swap(start_, other.start_);
    std::swap(bytes_, other.bytes_);
    return *this;
}

Mapping::~Mapping() {
    if (start_) munmap(start_, bytes_);
}

std::string UringQueue::explain(int error) {
    std::string what = "cannot set up asynchronous I/O (io_uring_setup)";
    if (error == EPERM || error == EACCES) {
        std::string disabled = "0";
        std::ifstream("/proc/sys/kernel/io_uring_disabled") >> disabled;
        what += disabled == "0" ? ": the container's system call filter does not allow io_uring"
                                : ": kernel.io_uring_disabled is " + disabled + "; set it to 0 with sysctl";
    } else if (error == EMFILE || error == ENFILE) {
        return what + ": too many files are open; raise the limit (ulimit -n)";
    } else if (error == ENOSYS) {
        what += ": this kernel has no io_uring, or the container's system call filter hides it";
    } else if (error == EINVAL) {
        what += ": this kernel's io_uring is older than Linux 5.10";
    } else if (error == ENOMEM || error == EAGAIN) {
        what += ": the kernel has no memory for its rings; older ones count them as locked memory (ulimit -l)";
    }
    return what + "; or use libaio (aio.engine)";
}

UringQueue::UringQueue(unsigned depth) {
    io_uring_params parameters;
    ring_fd_ = open_ring(depth + 2, parameters);
    if (ring_fd_ < 0) throw error_of(ring_fd_ == -ENOMEM ? EAGAIN : -ring_fd_);
    try {
        if (!(parameters.features & IORING_FEAT_SINGLE_MMAP) || !(parameters.features & IORING_FEAT_NODROP)) {
            throw error_of(EINVAL);
        }
        event_fd_ = eventfd(0, EFD_CLOEXEC);
        if (event_fd_ < 0) throw error_of(errno);
        map(parameters);
    } catch (...) {
        close(ring_fd_);
        if (event_fd_ >= 0) close(event_fd_);
        throw;
    }
    io_uring_rsrc_register table{};
    table.nr = kSlots;
    table.flags = IORING_RSRC_REGISTER_SPARSE;  // Linux 5.19
    if (register_with(ring_fd_, IORING_REGISTER_BUFFERS2, &table, sizeof table) < 0) return;
    for (unsigned slot = kSlots; slot-- > 0;) free_slots_.push_back(slot);
}

UringQueue::~UringQueue() {
    close(ring_fd_);
    close(event_fd_);
}

void UringQueue::map(const io_uring_params& parameters) {
    const size_t sq_bytes = parameters.sq_off.array + parameters.sq_entries * sizeof(unsigned);
    const size_t cq_bytes = parameters.cq_off.cqes + parameters.cq_entries * sizeof(io_uring_cqe);
    rings_ = Mapping(ring_fd_, IORING_OFF_SQ_RING, std::max(sq_bytes, cq_bytes));
    entries_ = Mapping(ring_fd_, IORING_OFF_SQES, parameters.sq_entries * sizeof(io_uring_sqe));
    sq_head_ = rings_.at<unsigned>(parameters.sq_off.head);
    sq_tail_ = rings_.at<unsigned>(parameters.sq_off.tail);
    sq_array_ = rings_.at<unsigned>(parameters.sq_off.array);
    sq_mask_ = *rings_.at<unsigned>(parameters.sq_off.ring_mask);
    sq_size_ = parameters.sq_entries;
    cq_head_ = rings_.at<unsigned>(parameters.cq_off.head);
    cq_tail_ = rings_.at<unsigned>(parameters.cq_off.tail);
    cq_mask_ = *rings_.at<unsigned>(parameters.cq_off.ring_mask);
    completions_ = rings_.at<io_uring_cqe>(parameters.cq_off.cqes);
    for (unsigned i = 0; i < sq_size_; ++i) sq_array_[i] = i;
}

int UringQueue::begin() {
    if (begun_) return 0;
    const int result = register_with(ring_fd_, IORING_REGISTER_ENABLE_RINGS, nullptr, 0);
    if (result < 0) return result;
    begun_ = true;
    listen();
    return 0;
}

io_uring_sqe& UringQueue::next_entry() {
    const unsigned tail = *sq_tail_;
    io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[tail & sq_mask_];
    std::memset(&entry, 0, sizeof entry);
    ++unsubmitted_;
    return entry;
}

void UringQueue::listen() {
    io_uring_sqe& entry = next_entry();
    entry.opcode = IORING_OP_READ;
    entry.fd = event_fd_;
    entry.addr = reinterpret_cast<uint64_t>(&wakes_);
    entry.len = sizeof wakes_;
    store(sq_tail_, *sq_tail_ + 1);  // user_data stays 0, which no operation has
}

int UringQueue::submit(std::span<Operation* const> operations) {
    if (!alive_) return -EBADF;
    if (const int result = begin(); result < 0) return result;
    int taken = 0;
    for (const Operation* operation : operations) {
        if (*sq_tail_ - load(sq_head_) + 1 >= sq_size_) break;  // the last entry is for the read of the eventfd
        const bool write = operation->direction == Direction::kWrite;
        const RegisteredBuffer* buffer = registered(*operation);
        io_uring_sqe& entry = next_entry();
        entry.opcode = buffer ? (write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED)
                              : (write ? IORING_OP_WRITE : IORING_OP_READ);
        if (buffer) entry.buf_index = static_cast<uint16_t>(buffer->slot);
        entry.fd = operation->fd;
        entry.off = operation->offset;
        entry.addr = operation->address;
        entry.len = static_cast<uint32_t>(operation->bytes);
        entry.rw_flags = operation->durable ? RWF_DSYNC : 0;
        entry.user_data = reinterpret_cast<uint64_t>(operation);
        store(sq_tail_, *sq_tail_ + 1);
        ++taken;
    }
    return taken;
}

int UringQueue::reap(std::span<Completion> completions, bool wait) {
    if (const int result = begin(); result < 0) return result;
    wait = wait && load(cq_tail_) == *cq_head_;
    const int result = enter(wait);
    if (result == -EAGAIN || result == -EBUSY) {  // no memory, or no free completion entries
        if (++refusals_ > patience()) return result;
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    } else if (result < 0) {
        return result;
    } else {
        refusals_ = 0;
    }
    return static_cast<int>(collect(completions));
}

int UringQueue::enter(bool wait) {
    const long result =
        syscall(SYS_io_uring_enter, ring_fd_, unsubmitted_, wait ? 1U : 0U, IORING_ENTER_GETEVENTS, nullptr, size_t{0});
    if (result < 0) return -errno;
    unsubmitted_ -= static_cast<unsigned>(result);
    return 0;
}

size_t UringQueue::collect(std::span<Completion> completions) {
    unsigned head = *cq_head_;
    const unsigned tail = load(cq_tail_);
    size_t count = 0;
    for (; head != tail && count < completions.size(); ++head) {
        const io_uring_cqe& found = completions_[head & cq_mask_];
        if (found.user_data == 0) {
            listen();
        } else {
            completions[count++] = {reinterpret_cast<Operation*>(found.user_data), found.res};
        }
    }
    store(cq_head_, head);
    return count;
}

void UringQueue::wake() {
    const uint64_t one = 1;
    while (write(event_fd_, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

void UringQueue::abandon(unsigned in_flight) {
    alive_ = false;
    std::vector<Completion> lost(64);
    for (int failures = 0; in_flight > 0 && failures < 1000;) {
        const int count = reap(lost, true);
        if (count >= 0) {
            in_flight -= std::min(in_flight, static_cast<unsigned>(count));
        } else if (count != -EINTR) {
            ++failures;
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
    }
}

const UringQueue::RegisteredBuffer* UringQueue::registered(const Operation& operation) const {
    auto after = std::ranges::upper_bound(registered_, operation.address, {}, &RegisteredBuffer::address);
    if (after == registered_.begin()) return nullptr;
    const RegisteredBuffer& buffer = *--after;
    return operation.address + operation.bytes <= buffer.address + buffer.bytes ? &buffer : nullptr;
}

bool UringQueue::set_slot(unsigned slot, uint64_t address, uint64_t bytes) {
    iovec memory{reinterpret_cast<void*>(address), bytes};
    io_uring_rsrc_update2 update{};
    update.offset = slot;
    update.data = reinterpret_cast<uint64_t>(&memory);
    update.nr = 1;
    return register_with(ring_fd_, IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof update) == 1;
}

bool UringQueue::register_buffer(uint64_t address, uint64_t bytes) {
    if (begin() < 0 || free_slots_.empty() || bytes == 0 || bytes > kLargestBuffer) return false;
    const unsigned slot = free_slots_.back();
    if (!set_slot(slot, address, bytes)) return false;  // usually more than this user may lock (ulimit -l)
    free_slots_.pop_back();
    registered_.insert(std::ranges::upper_bound(registered_, address, {}, &RegisteredBuffer::address),
                       {address, bytes, slot});
    return true;
}

void UringQueue::unregister_buffer(uint64_t address) {
    const auto found = std::ranges::find(registered_, address, &RegisteredBuffer::address);
    if (found == registered_.end()) return;
    set_slot(found->slot, 0, 0);
    free_slots_.push_back(found->slot);
    registered_.erase(found);
}

}  // namespace infinity::aio
