// Queued work of all streams, and which of it runs when. Work runs only when somebody waits for some of it (and, by
// mode, when more is queued), in an order that a seeded generator chooses among all that streams and events allow.
#pragma once

#include <algorithm>
#include <chrono>
#include <compare>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace late {

constexpr int devices = 2;
constexpr unsigned char poison = 0xFF;

// How much runs besides the work that is waited for: nothing; some, at waits and now and then when work is queued;
// everything that can, half of the times that work is queued.
enum class Mode : int { lazy, random, eager };

enum class Kind : int { kernel, copy, mark, free };

struct StreamKey {
    int device = 0;
    int64_t id = 0;
    auto operator<=>(const StreamKey&) const = default;
};

// Host memory that a copy reads or writes: [begin, end).
struct HostRange {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    bool overlaps(const HostRange& other) const { return begin < other.end && other.begin < end; }
};

struct Task;
using TaskPtr = std::shared_ptr<Task>;
using Work = std::function<void()>;

struct Task {
    StreamKey stream;
    Kind kind = Kind::kernel;
    uint64_t number = 0;  // by order of issue, over all streams
    Work work;
    std::vector<TaskPtr> after;  // on other streams
    HostRange host;
    bool done = false;
    std::chrono::steady_clock::time_point time{};  // of execution
};

struct Counters {
    int64_t kernels_queued = 0;
    int64_t kernels_executed = 0;
    int64_t kernels_at_once = 0;
    int64_t copies_queued = 0;
    int64_t copies_executed = 0;
    int64_t inference_failed = 0;
    int64_t most_queued = 0;
    int64_t waits = 0;
};

// Thread-safe. Work runs under the lock, on any thread that waits, and must not need Python's lock, which other threads
// hold while they wait for this one.
class Scheduler {
  public:
    // Never destroyed: tensors are freed after static objects.
    static Scheduler& instance() {
        static auto* const only = new Scheduler;
        return *only;
    }

    void set_seed(uint64_t seed) {
        const Lock lock(mutex_);
        random_.seed(seed);
        for (auto& [key, queue] : queues_) queue.weight = 0;
    }

    void set_mode(Mode mode) {
        const Lock lock(mutex_);
        mode_ = mode;
    }

    // Does not throw what work throws: the next wait does.
    TaskPtr enqueue(StreamKey stream, Kind kind, Work work, std::vector<TaskPtr> after = {}, HostRange host = {}) {
        const Lock lock(mutex_);
        auto task = std::make_shared<Task>();
        task->stream = stream;
        task->kind = kind;
        task->number = next_number_++;
        task->work = std::move(work);
        std::erase_if(after, [](const TaskPtr& other) { return !other || other->done; });
        task->after = std::move(after);
        task->host = host;
        queue_of(stream).tasks.push_back(task);
        counters_.kernels_queued += kind == Kind::kernel;
        counters_.copies_queued += kind == Kind::copy;
        counters_.most_queued = std::max(counters_.most_queued, pending());
        progress_unasked();
        return task;
    }

    // The newest work of `stream`; null if all has run.
    TaskPtr newest(StreamKey stream) {
        const Lock lock(mutex_);
        auto& tasks = queue_of(stream).tasks;
        return tasks.empty() ? nullptr : tasks.back();
    }

    // Runs `targets` and everything that they need. Throws the first exception of any work run since the last wait.
    void wait(const std::vector<TaskPtr>& targets) {
        const Lock lock(mutex_);
        ++counters_.waits;
        const auto needed = needed_for(targets);
        for (const auto& target : targets) {
            while (target && !target->done) {
                if (!step(mode_ == Mode::lazy ? &needed : nullptr)) throw std::logic_error("late: nothing can run");
            }
        }
        release_retired();
        if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    }

    void wait_for_stream(StreamKey stream) { wait({newest(stream)}); }

    void wait_for_device(int device) {
        const Lock lock(mutex_);
        std::vector<TaskPtr> targets;
        for (auto& [key, queue] : queues_) {
            if (key.device != device) continue;
            if (!queue.tasks.empty()) targets.push_back(queue.tasks.back());
        }
        wait(targets);
    }

    // Returns whether `task` has run. Sometimes some work runs first, so that polling ends, as time passes on a device.
    bool query(const TaskPtr& task) {
        const Lock lock(mutex_);
        if (!task || task->done) return true;
        if (draw(4) == 0) {
            const auto needed = needed_for({task});
            step(mode_ == Mode::lazy ? &needed : nullptr);
        }
        return task->done;
    }

    bool touches_host(HostRange range) {
        const Lock lock(mutex_);
        for (const auto& [key, queue] : queues_) {
            for (const auto& task : queue.tasks) {
                if (task->host.overlaps(range)) return true;
            }
        }
        return false;
    }

    int64_t pending() {
        const Lock lock(mutex_);
        int64_t count = 0;
        for (const auto& [key, queue] : queues_) count += static_cast<int64_t>(queue.tasks.size());
        return count;
    }

    // Frees `memory` (of malloc) once all work has run that was issued before: it may use that memory, rightly (pinned
    // memory) or wrongly (memory freed on another stream). `poisoned`: the memory is poison, and a write is an error.
    void retire(void* memory, size_t nbytes, bool poisoned) {
        const Lock lock(mutex_);
        retired_.push_back({memory, nbytes, poisoned, next_number_});
        release_retired();
    }

    Counters counted() {
        const Lock lock(mutex_);
        return counters_;
    }

    void count_at_once(const std::string& name) {
        const Lock lock(mutex_);
        ++counters_.kernels_at_once;
        ++at_once_[name];
    }

    // "name count" of each operator that was not late, a line each.
    std::string at_once() {
        const Lock lock(mutex_);
        std::string lines;
        for (const auto& [name, count] : at_once_) lines += name + ' ' + std::to_string(count) + '\n';
        return lines;
    }

    void count_failed_inference() {
        const Lock lock(mutex_);
        ++counters_.inference_failed;
    }

  private:
    using Lock = std::lock_guard<std::recursive_mutex>;

    struct Queue {
        std::deque<TaskPtr> tasks;
        uint64_t weight = 0;  // streams differ in speed; 0 until it is drawn, at the first use
    };

    struct Retired {
        void* memory;
        size_t nbytes;
        bool poisoned;
        uint64_t number;
    };

    uint64_t draw(uint64_t bound) { return random_() % bound; }

    Queue& queue_of(StreamKey stream) {
        auto& queue = queues_[stream];
        weigh(queue);
        return queue;
    }

    void weigh(Queue& queue) {
        if (queue.weight == 0) queue.weight = uint64_t{1} << (3 * draw(3));
    }

    // Per stream, the number of the last task that `targets` need.
    std::map<StreamKey, uint64_t> needed_for(const std::vector<TaskPtr>& targets) {
        std::map<StreamKey, uint64_t> needed;
        std::vector<TaskPtr> open = targets;
        while (!open.empty()) {
            const TaskPtr task = std::move(open.back());
            open.pop_back();
            if (!task || task->done) continue;
            const auto known = needed.find(task->stream);
            const bool first = known == needed.end();
            const uint64_t covered = first ? 0 : known->second;
            if (!first && covered >= task->number) continue;
            needed[task->stream] = task->number;
            for (const auto& before : queue_of(task->stream).tasks) {
                if (before->number > task->number) break;
                if (first || before->number > covered)
                    open.insert(open.end(), before->after.begin(), before->after.end());
            }
        }
        return needed;
    }

    static bool ready(const Task& task) {
        return std::all_of(task.after.begin(), task.after.end(), [](const TaskPtr& other) { return other->done; });
    }

    // Runs one task of those that can run (among `needed`, unless null). Returns false if there is none.
    bool step(const std::map<StreamKey, uint64_t>* needed) {
        std::vector<Queue*> choices;
        uint64_t total = 0;
        for (auto& [key, queue] : queues_) {
            if (queue.tasks.empty() || !ready(*queue.tasks.front())) continue;
            if (needed) {
                const auto limit = needed->find(key);
                if (limit == needed->end() || queue.tasks.front()->number > limit->second) continue;
            }
            weigh(queue);  // its work may be older than the seed
            choices.push_back(&queue);
            total += queue.weight;
        }
        if (choices.empty()) return false;
        uint64_t chosen = draw(total);
        for (auto* queue : choices) {
            if (chosen < queue->weight) {
                run_first(*queue);
                break;
            }
            chosen -= queue->weight;
        }
        return true;
    }

    void run_first(Queue& queue) {
        const TaskPtr task = queue.tasks.front();
        running_ = true;
        try {
            if (task->work) task->work();
        } catch (...) {
            if (!error_) error_ = std::current_exception();
        }
        running_ = false;
        queue.tasks.pop_front();
        task->done = true;
        task->time = std::chrono::steady_clock::now();
        task->work = nullptr;
        task->after.clear();
        counters_.kernels_executed += task->kind == Kind::kernel;
        counters_.copies_executed += task->kind == Kind::copy;
    }

    void progress_unasked() {
        if (running_ || mode_ == Mode::lazy) return;
        if (mode_ == Mode::eager && draw(2) == 0) {
            while (step(nullptr)) {
            }
        } else if (mode_ == Mode::random && draw(4) == 0) {
            for (uint64_t steps = draw(8); steps > 0 && step(nullptr); --steps) {
            }
        }
    }

    void release_retired() {
        uint64_t oldest = next_number_;
        for (const auto& [key, queue] : queues_) {
            if (!queue.tasks.empty()) oldest = std::min(oldest, queue.tasks.front()->number);
        }
        std::erase_if(retired_, [&](const Retired& block) {
            if (block.number > oldest) return false;
            const auto* bytes = static_cast<const unsigned char*>(block.memory);
            if (block.poisoned && !std::all_of(bytes, bytes + block.nbytes, [](auto byte) { return byte == poison; })) {
                if (!error_) error_ = std::make_exception_ptr(std::runtime_error(message_of_late_write));
            }
            std::free(block.memory);
            return true;
        });
    }

    static constexpr const char* message_of_late_write =
        "late: queued work wrote into device memory after this was freed on the stream that it was allocated on. Call "
        "record_stream, or wait for the work before the tensor is deleted.";

    std::recursive_mutex mutex_;
    std::map<StreamKey, Queue> queues_;
    std::vector<Retired> retired_;
    std::mt19937_64 random_{0};
    Mode mode_ = Mode::random;
    uint64_t next_number_ = 1;
    bool running_ = false;
    std::exception_ptr error_;
    Counters counters_;
    std::map<std::string, int64_t> at_once_;
};

}  // namespace late
