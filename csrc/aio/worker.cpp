#include "worker.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <utility>

namespace infinity::aio {
namespace {

void back_off(unsigned times) { std::this_thread::sleep_for(std::chrono::milliseconds(std::min(times, 10U))); }

std::string why_short(const Request& request, uint64_t offset) {
    if (request.direction == Direction::kWrite) return "the file system wrote no bytes and returned no error";
    struct stat status{};
    std::string text = "the file ended at or before offset " + std::to_string(request.file->locate(offset).offset);
    const int fd = request.file->members()[request.file->locate(offset).member].buffered_fd;
    if (fstat(fd, &status) == 0) {
        text += " (its size is now " + std::to_string(status.st_size) + " bytes)";
    }
    return text;
}

// Records the checksums of a piece before it is written.
void record(const Request& request, const Piece& piece) {
    Checksums* sums = request.file->checksums();
    if (!sums || request.direction != Direction::kWrite) return;
    sums->record(piece.first, piece.first + piece.left, request.offset + request.nbytes, request.memory(piece.first));
}

// Starts a thread with all signals blocked, so that they are delivered to the program's own threads.
std::thread start_without_signals(auto&& body, const std::string& name) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        std::thread thread(body);
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        pthread_setname_np(thread.native_handle(), name.c_str());
        return thread;
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
}

}  // namespace

Worker::Worker(std::unique_ptr<Queue> queue, unsigned depth, const std::string& name, Counters& counters)
    : queue_(std::move(queue)), counters_(counters), slots_(depth), completions_(depth) {
    for (Slot& slot : slots_) {
        slot.index = static_cast<unsigned>(free_.size());
        free_.push_back(&slot);
    }
    ready_.reserve(depth);
    operations_.reserve(depth);
    thread_ = start_without_signals([this] { run(); }, name);
}

void Worker::push(Job job) {
    {
        const std::lock_guard lock(mutex_);
        inbox_.push_back(std::move(job));
    }
    queue_->wake();
}

void Worker::call(const std::function<void(Queue&)>& work) {
    std::promise<void> done;
    {
        const std::lock_guard lock(mutex_);
        calls_.push_back([&] {
            work(*queue_);
            done.set_value();
        });
    }
    queue_->wake();
    done.get_future().wait();
}

void Worker::stop() {
    if (!thread_.joinable()) return;
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    queue_->wake();
    thread_.join();
}

void Worker::run() {
    while (collect()) {
        fill();
        submit();
        if (in_flight_ > 0) reap();
    }
}

bool Worker::collect() {
    while (true) {
        std::vector<std::function<void()>> calls;
        bool stopping = false;
        {
            const std::lock_guard lock(mutex_);
            for (Job& job : inbox_) jobs_[job.request()->direction == Direction::kWrite].push_back(std::move(job));
            inbox_.clear();
            calls.swap(calls_);
            stopping = stopping_;
        }
        for (const auto& call : calls) call();
        if (busy()) return true;
        if (stopping) return false;
        if (broken_ == 0) {
            reap();
        } else {  // without a queue, nothing can wake this thread
            back_off(10);
        }
    }
}

void Worker::fill() {
    while (!free_.empty()) {
        // A buffered piece may block in io_submit. It must be the last of its batch, or it would delay those after it.
        if (!ready_.empty() && !ready_.back()->piece.direct) return;
        Job* job = next_job();
        if (!job) return;
        Slot& slot = *free_.back();
        free_.pop_back();
        slot.piece = job->next();
        slot.request = job->request();
        slot.begun = Clock::now();
        record(*slot.request, slot.piece);
        prepare(slot);
    }
}

Job* Worker::next_job() {
    for (int tries = 0; tries < 2; ++tries) {
        std::deque<Job>& queue = jobs_[turn_];
        turn_ = 1 - turn_;
        while (!queue.empty()) {
            Job& job = queue.front();
            const uint64_t remaining = job.remaining();
            if (remaining > 0 && !job.request()->failed()) return &job;
            if (remaining > 0) job.request()->end(remaining);
            queue.pop_front();
        }
    }
    return nullptr;
}

void Worker::prepare(Slot& slot) {
    const File::Place place = slot.request->file->locate(slot.piece.offset);
    slot.direction = slot.request->direction;
    slot.durable = slot.direction == Direction::kWrite && !slot.piece.direct;  // see file.h
    slot.fd = slot.request->file->members()[place.member].fd(slot.piece.direct);
    slot.offset = place.offset;
    slot.address = reinterpret_cast<uint64_t>(slot.request->memory(slot.piece.offset));
    slot.bytes = slot.piece.left;
    ready_.push_back(&slot);
}

void Worker::submit() {
    while (!ready_.empty()) {
        if (broken_ != 0) {
            fail_first(broken_, "this I/O thread lost its queue in the kernel earlier; create a new engine");
            continue;
        }
        operations_.assign(ready_.begin(), ready_.end());
        const int taken = queue_->submit(operations_);
        if (taken > 0) {
            in_flight_ += static_cast<size_t>(taken);
            ready_.erase(ready_.begin(), ready_.begin() + taken);
            stalls_ = 0;
        } else if (taken == 0 || taken == -EAGAIN || taken == -EINTR) {
            if (in_flight_ > 0) return;  // retried after the next completion
            if (stalls_ < queue_->patience()) {
                ++stalls_;
                if (taken != -EINTR) back_off(stalls_);
                continue;
            }
            stalls_ = 0;
            fail_first(taken == 0 ? EAGAIN : -taken, "the kernel rejected its submission");
        } else {  // the error is about the first operation
            fail_first(-taken, "the kernel rejected its submission");
        }
    }
}

void Worker::fail_first(int error, const std::string& hint) {
    Slot& first = *ready_.front();
    ready_.erase(ready_.begin());
    fail(first, error, hint);
}

void Worker::reap() {
    int count = 0;
    do {
        count = queue_->reap(completions_, /*wait=*/true);
    } while (count == -EINTR);
    if (count < 0) {
        break_down(-count);
        return;
    }
    for (int i = 0; i < count; ++i) {
        --in_flight_;
        const Completion& completion = completions_[static_cast<size_t>(i)];
        finish(*static_cast<Slot*>(completion.operation), completion.result);
    }
}

void Worker::finish(Slot& slot, int64_t result) {
    Piece& piece = slot.piece;
    Request& request = *slot.request;
    if (result > 0 && static_cast<uint64_t>(result) <= piece.left) {
        const auto bytes = static_cast<uint64_t>(result);
        const bool write = request.direction == Direction::kWrite;
        (write ? counters_.bytes_written : counters_.bytes_read).fetch_add(bytes, std::memory_order_relaxed);
        if (!piece.direct) counters_.bytes_buffered.fetch_add(bytes, std::memory_order_relaxed);
        piece.advance(bytes);
        const bool whole = piece.left == 0;
        if (!whole && bytes % request.file->alignment() != 0) piece.direct = false;  // the rest starts inside a block
        if (whole) {
            counters_.latencies.add(Clock::now() - slot.begun);
            request.verify(piece.first, piece.offset);
        }
        request.transferred(bytes);
        if (whole) {
            release(slot);
        } else if (request.failed()) {
            request.end(piece.left);
            release(slot);
        } else {
            prepare(slot);
        }
    } else if ((result == -EINTR || result == -EAGAIN) && ++piece.retries <= queue_->patience()) {
        if (result == -EAGAIN) back_off(piece.retries);
        prepare(slot);
    } else if (result < 0) {
        fail(slot, static_cast<int>(-result),
             result == -EINVAL && piece.direct
                 ? "the file system refuses direct I/O here; open the file without O_DIRECT"
                 : "");
    } else {
        fail(slot, EIO, why_short(request, piece.offset));
    }
}

void Worker::fail(Slot& slot, int error, const std::string& hint) {
    slot.request->fail(error, slot.piece.offset, slot.piece.left, hint);
    slot.request->end(slot.piece.left);
    release(slot);
}

void Worker::release(Slot& slot) {
    slot.request.reset();
    free_.push_back(&slot);
}

// Abandons the queue, whose completions cannot be read, and fails the pieces in flight, whose results are unknown.
void Worker::break_down(int error) {
    queue_->abandon(static_cast<unsigned>(in_flight_));
    broken_ = error;
    in_flight_ = 0;
    ready_.clear();
    for (Slot& slot : slots_) {
        if (slot.request) fail(slot, error, "its result could not be read");
    }
}

}  // namespace infinity::aio
