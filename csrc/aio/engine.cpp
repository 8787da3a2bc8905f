#include "engine.h"

#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "faulty_queue.h"

namespace infinity::aio {
namespace {

constexpr int64_t kBlock = 4096;

void check_range(const char* what, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return;
    throw std::invalid_argument(std::string(what) + " is " + std::to_string(value) + "; it must be between " +
                                std::to_string(low) + " and " + std::to_string(high));
}

}  // namespace

void check_memory(uint64_t address, int64_t nbytes) {
    check_range("nbytes", nbytes, 0, std::numeric_limits<int64_t>::max());
    if (nbytes > 0 && address == 0) throw std::invalid_argument("address is 0 (a null pointer); pass that of a buffer");
    constexpr auto kEnd = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    if (address > kEnd || static_cast<uint64_t>(nbytes) > kEnd - address) {
        throw std::invalid_argument("nbytes is " + std::to_string(nbytes) +
                                    ", with which the buffer ends beyond the address space; pass a buffer's size");
    }
}

namespace {

Options checked(const Options& options) {
    check_range("block_size", options.block_size, kBlock, kLargestBlock);
    if (options.block_size % kBlock != 0) {
        throw std::invalid_argument("block_size is " + std::to_string(options.block_size) +
                                    "; it must be a multiple of 4096");
    }
    check_range("queue_depth", options.queue_depth, 1, 1 << 16);
    check_range("threads", options.threads, 1, kMostThreads);
    return options;
}

}  // namespace

Engine::Engine(const Options& options, const Backend& backend)
    : backend_(backend), options_(checked(options)), owner_(getpid()) {
    open_workers();
}

// If the system has too few AIO slots (fs.aio-max-nr), halves the queue depth of all threads, down to 1.
void Engine::open_workers() {
    std::vector<std::unique_ptr<Queue>> queues;
    const auto threads = static_cast<size_t>(options_.threads);
    while (queues.size() < threads) {
        try {
            queues.push_back(open_queue(backend_, static_cast<unsigned>(options_.queue_depth)));
        } catch (const std::system_error& error) {
            if (error.code().value() != EAGAIN || options_.queue_depth == 1) {
                throw std::system_error(error.code(), backend_.explain(error.code().value()));
            }
            queues.clear();
            options_.queue_depth /= 2;
        }
    }
    for (size_t i = 0; i < threads; ++i) {
        workers_.push_back(std::make_unique<Worker>(std::move(queues[i]), static_cast<unsigned>(options_.queue_depth),
                                                    "infinity-aio-" + std::to_string(i), counters_));
    }
}

Worker& Engine::worker(size_t member, size_t members, size_t turn) {
    const size_t threads = workers_.size();
    if (members >= threads) return *workers_[member % threads];
    const size_t own = (threads - member + members - 1) / members;  // threads w with w % members == member
    return *workers_[member + turn % own * members];
}

// Pieces are verified one by one, so each must consist of whole checksum blocks.
void Engine::check_blocks(uint64_t block, uint64_t offset) const {
    for (const auto& [what, value] : {std::pair{"offset", offset}, {"block_size", uint64_t(options_.block_size)}}) {
        if (value % block == 0) continue;
        throw std::invalid_argument(std::string(what) + " is " + std::to_string(value) +
                                    "; with checksums it must be a multiple of " + std::to_string(block));
    }
}

std::shared_ptr<Request> Engine::start(Direction direction, std::shared_ptr<const File> file, int64_t offset,
                                       uint64_t address, int64_t nbytes) {
    if (!file) throw std::invalid_argument("file is None; open one first");
    check_range("offset", offset, 0, std::numeric_limits<int64_t>::max());
    check_range("nbytes", nbytes, 0, std::numeric_limits<int64_t>::max() - offset);
    check_memory(address, nbytes);
    if (getpid() != owner_) {
        throw std::logic_error("this I/O engine belongs to the process that created it, not to its forked children");
    }
    const std::lock_guard lock(mutex_);
    if (closed_) throw std::logic_error("this I/O engine is closed");

    const auto begin = static_cast<uint64_t>(offset), size = static_cast<uint64_t>(nbytes), end = begin + size;
    auto request = std::make_shared<Request>(direction, std::move(file), begin, address, size);
    const File& target = *request->file;
    const size_t members = target.members().size();
    if (target.checksums()) check_blocks(target.checksums()->block(), begin);
    // Each member's threads get contiguous shares of its bytes.
    const uint64_t block_size = round_up(static_cast<uint64_t>(options_.block_size), target.alignment());
    const size_t parts = std::max<size_t>(1, workers_.size() / members);
    const uint64_t grain = members > 1 ? std::lcm(block_size, target.stripe()) : block_size;
    const uint64_t share = round_up((size + parts - 1) / parts, grain);
    for (uint64_t from = begin; from < end; ++turn_) {
        const uint64_t to = std::min(end, round_down(from, grain) + share);
        for (size_t member = 0; member < members; ++member) {
            Job job(request, member, from, to, block_size);
            if (job.remaining() > 0) worker(member, members, turn_).push(std::move(job));
        }
        from = to;
    }
    return request;
}

// Registers on all threads or on none: after a return of false the caller unmaps the memory without unregistering it.
bool Engine::register_buffer(uint64_t address, int64_t nbytes) {
    check_range("nbytes", nbytes, 1, std::numeric_limits<int64_t>::max());
    check_memory(address, nbytes);
    if (getpid() != owner_) return false;
    const std::lock_guard lock(mutex_);
    if (closed_) return false;
    bool all = true;
    for (const auto& worker : workers_) {
        if (!all) break;
        worker->call([&](Queue& queue) { all = queue.register_buffer(address, static_cast<uint64_t>(nbytes)); });
    }
    if (!all) {
        for (const auto& worker : workers_) worker->call([&](Queue& queue) { queue.unregister_buffer(address); });
    }
    return all;
}

void Engine::unregister_buffer(uint64_t address) {
    if (getpid() != owner_) return;
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    for (const auto& worker : workers_) worker->call([&](Queue& queue) { queue.unregister_buffer(address); });
}

void Engine::close() {
    if (getpid() != owner_) {  // the threads do not exist in this child, and the lock may be held for ever
        for (auto& worker : workers_) (void)worker.release();
        return;
    }
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (auto& worker : workers_) worker->stop();
    workers_.clear();
}

}  // namespace infinity::aio
