#include "faulty_queue.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace infinity::aio {
namespace {

class FaultyQueue;

struct Held {
    FaultyQueue* queue;
    Completion completion;
};

struct State {
    std::mutex mutex;
    std::vector<Fault> faults;
    std::vector<Held> held;      // delayed completions
    std::vector<Held> released;  // reported by their queue's next reap()
};

State& state() {
    static State* only = new State;  // threads may outlive static destructors
    return *only;
}

// Returns the fault to inject now, or null. Requires the state's mutex.
Fault* strike(const char* where, const Operation* operation = nullptr, unsigned depth = 0) {
    for (Fault& fault : state().faults) {
        if (fault.where != where || (fault.above > 0 && depth <= fault.above)) continue;
        if (operation && fault.only && *fault.only != operation->direction) continue;
        const long turn = fault.seen++ - fault.after;
        if (turn >= 0 && (fault.times < 0 || turn < fault.times)) return &fault;
    }
    return nullptr;
}

class FaultyQueue final : public Queue {
  public:
    explicit FaultyQueue(std::unique_ptr<Queue> real) : real_(std::move(real)) {}

    int submit(std::span<Operation* const> operations) override {
        {
            const std::lock_guard lock(state().mutex);
            if (const Fault* fault = strike("submit")) {
                if (fault->error != 0) return -fault->error;
                operations = operations.first(std::min(operations.size(), static_cast<size_t>(fault->accept)));
                if (operations.empty()) return 0;
            }
            for (Operation* operation : operations) {
                const Fault* fault = strike("block", operation);
                if (fault && fault->signal) {
                    std::raise(fault->signal);
                } else if (fault) {
                    operation->bytes = std::min(operation->bytes, static_cast<uint64_t>(fault->bytes));
                }
            }
        }
        const int taken = real_->submit(operations);
        if (taken > 0) in_flight_ += static_cast<size_t>(taken);
        return taken;
    }

    int reap(std::span<Completion> completions, bool wait) override {
        {
            const std::lock_guard lock(state().mutex);
            if (in_flight_ > 0) {
                if (const Fault* fault = strike("reap")) return -fault->error;
            }
            if (std::ranges::any_of(state().released, [this](const Held& held) { return held.queue == this; })) {
                wait = false;
            }
        }
        const int count = real_->reap(completions, wait);
        return count < 0 ? count : spoil(completions, static_cast<size_t>(count));
    }

    void wake() override { real_->wake(); }
    void abandon(unsigned in_flight) override { real_->abandon(in_flight); }
    bool register_buffer(uint64_t address, uint64_t bytes) override { return real_->register_buffer(address, bytes); }
    void unregister_buffer(uint64_t address) override { real_->unregister_buffer(address); }
    unsigned patience() const override { return 20; }

  private:
    // Changes results, delays completions, and adds released ones. Returns the new number of completions.
    int spoil(std::span<Completion> completions, size_t count) {
        const std::lock_guard lock(state().mutex);
        in_flight_ -= count;
        size_t kept = 0;
        for (Completion completion : completions.first(count)) {
            const Fault* fault = strike("event", completion.operation);
            if (fault && fault->hold) {
                state().held.push_back({this, completion});
                continue;
            }
            if (fault && fault->signal) {
                std::raise(fault->signal);
            } else if (fault && fault->milliseconds) {
                std::this_thread::sleep_for(std::chrono::milliseconds(fault->milliseconds));
            } else if (fault && fault->flip) {
                *reinterpret_cast<unsigned char*>(completion.operation->address) ^= 1;
            } else if (fault) {
                completion.result = -fault->error;
            }
            completions[kept++] = completion;
        }
        std::erase_if(state().released, [&](const Held& held) {
            if (held.queue != this || kept == completions.size()) return false;
            completions[kept++] = held.completion;
            return true;
        });
        return static_cast<int>(kept);
    }

    std::unique_ptr<Queue> real_;
    size_t in_flight_ = 0;
};

}  // namespace

void inject(std::vector<Fault> faults) {
    const std::lock_guard lock(state().mutex);
    state().faults = std::move(faults);
}

size_t release_held() {
    const std::lock_guard lock(state().mutex);
    std::erase_if(state().faults, [](const Fault& fault) { return fault.hold; });
    const std::vector<Held> held = std::exchange(state().held, {});
    for (const Held& one : held) {
        state().released.push_back(one);
        one.queue->wake();
    }
    return held.size();
}

std::vector<long> matches() {
    const std::lock_guard lock(state().mutex);
    std::vector<long> seen;
    for (const Fault& fault : state().faults) seen.push_back(fault.seen);
    return seen;
}

std::unique_ptr<Queue> open_queue(const Backend& backend, unsigned depth) {
    {
        const std::lock_guard lock(state().mutex);
        if (state().faults.empty()) return backend.open(depth);
        if (const Fault* fault = strike("setup", nullptr, depth)) {
            throw std::system_error(fault->error, std::generic_category());
        }
    }
    return std::make_unique<FaultyQueue>(backend.open(depth));
}

}  // namespace infinity::aio
