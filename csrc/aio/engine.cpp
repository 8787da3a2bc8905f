#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace infinity::aio {
namespace {

constexpr int64_t kBlock = 4096;

void check_range(const char* what, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return;
    throw std::invalid_argument(std::string(what) + " is " + std::to_string(value) + "; it must be between " +
                                std::to_string(low) + " and " + std::to_string(high));
}

Options checked(const Options& options) {
    check_range("block_size", options.block_size, kBlock, 1 << 30);
    if (options.block_size % kBlock != 0) {
        throw std::invalid_argument("block_size is " + std::to_string(options.block_size) +
                                    "; it must be a multiple of 4096");
    }
    check_range("queue_depth", options.queue_depth, 1, 1 << 16);
    check_range("threads", options.threads, 1, 256);
    return options;
}

}  // namespace

Engine::Engine(const Options& options, const Calls& calls)
    : calls_(calls), options_(checked(options)), owner_(getpid()) {
    for (int64_t i = 0; i < options_.threads; ++i) {
        workers_.push_back(std::make_unique<Worker>(calls_, static_cast<unsigned>(options_.queue_depth),
                                                    "infinity-aio-" + std::to_string(i), counters_));
    }
    for (const auto& worker : workers_) {
        options_.queue_depth = std::min<int64_t>(options_.queue_depth, worker->depth());
    }
}

std::shared_ptr<Request> Engine::start(Direction direction, std::shared_ptr<const File> file, int64_t offset,
                                       uint64_t address, int64_t nbytes) {
    if (!file) throw std::invalid_argument("file is None; open one first");
    check_range("offset", offset, 0, std::numeric_limits<int64_t>::max());
    check_range("nbytes", nbytes, 0, std::numeric_limits<int64_t>::max() - offset);
    if (nbytes > 0 && address == 0) throw std::invalid_argument("address is 0 (a null pointer); pass that of a buffer");
    if (getpid() != owner_) {
        throw std::logic_error("this I/O engine belongs to the process that created it, not to its forked children");
    }
    const std::lock_guard lock(mutex_);
    if (closed_) throw std::logic_error("this I/O engine is closed");

    const auto begin = static_cast<uint64_t>(offset), size = static_cast<uint64_t>(nbytes), end = begin + size;
    auto request = std::make_shared<Request>(direction, std::move(file), begin, address, size);
    const uint64_t alignment = request->file->alignment();
    const uint64_t block_size = round_up(static_cast<uint64_t>(options_.block_size), alignment);
    const uint64_t share = round_up((size + workers_.size() - 1) / workers_.size(), block_size);
    for (uint64_t from = begin; from < end; next_ = (next_ + 1) % workers_.size()) {
        const uint64_t to = std::min(end, round_down(from, alignment) + share);
        workers_[next_]->push(Job(request, from, to, block_size));
        from = to;
    }
    return request;
}

void Engine::close() {
    if (getpid() != owner_) {  // the threads, what they own, and perhaps the lock, are the parent's
        for (auto& worker : workers_) (void)worker.release();
        return;
    }
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (auto& worker : workers_) worker->stop();
    workers_.clear();
}

}  // namespace infinity::aio
