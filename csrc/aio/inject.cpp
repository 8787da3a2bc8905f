#include "inject.h"

#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <utility>

namespace infinity::aio {
namespace {

struct Held {
    aio_context_t context;
    io_event event;
};

struct State {
    std::mutex mutex;
    std::vector<Fault> faults;
    std::vector<Held> held;      // completions kept back
    std::vector<Held> released;  // to be reported by their context's next getevents
};

State& state() {
    static State* only = new State;  // threads may outlive static destructors
    return *only;
}

Direction direction_of(const iocb& block) {
    return block.aio_lio_opcode == IOCB_CMD_PREAD ? Direction::kRead : Direction::kWrite;
}

// The fault that strikes now, if one does. With the state's mutex held.
Fault* strike(const char* where, const iocb* block = nullptr, unsigned events = 0) {
    for (Fault& fault : state().faults) {
        if (fault.where != where || (fault.above > 0 && events <= fault.above)) continue;
        if (block && fault.only && *fault.only != direction_of(*block)) continue;
        const long turn = fault.seen++ - fault.after;
        if (turn >= 0 && (fault.times < 0 || turn < fault.times)) return &fault;
    }
    return nullptr;
}

// Changes results, keeps completions back, and lets go of those that were released. With the state's mutex held.
int spoil(aio_context_t context, io_event* events, int count, long max) {
    State& s = state();
    int kept = 0;
    for (int i = 0; i < count; ++i) {
        const Fault* fault = strike("event", reinterpret_cast<const iocb*>(events[i].obj));
        if (fault && fault->hold) {
            s.held.push_back({context, events[i]});
            continue;
        }
        if (fault) events[i].res = -fault->error;
        events[kept++] = events[i];
    }
    std::erase_if(s.released, [&](const Held& held) {
        if (held.context != context || kept == max) return false;
        events[kept++] = held.event;
        return true;
    });
    return kept;
}

// Functions have no room for the table they pass on to: one set of them per table.
template <size_t kIndex>
struct Faulty {
    static const Calls& base() { return *available_calls()[kIndex]; }

    static int setup(unsigned events, aio_context_t* context) {
        const std::lock_guard lock(state().mutex);
        if (const Fault* fault = strike("setup", nullptr, events)) return -fault->error;
        return base().setup(events, context);
    }

    static int submit(aio_context_t context, long count, iocb** blocks) {
        {
            const std::lock_guard lock(state().mutex);
            if (const Fault* fault = strike("submit")) {
                if (fault->error != 0) return -fault->error;
                count = std::min(count, fault->accept);
                if (count == 0) return 0;
            }
            for (long i = 0; i < count; ++i) {
                const Fault* fault = strike("block", blocks[i]);
                if (fault) blocks[i]->aio_nbytes = std::min<uint64_t>(blocks[i]->aio_nbytes, fault->bytes);
            }
        }
        return base().submit(context, count, blocks);
    }

    static int getevents(aio_context_t context, long min, long max, io_event* events, timespec* timeout) {
        const std::lock_guard lock(state().mutex);
        if (const Fault* fault = strike("getevents")) return -fault->error;
        const int count = base().getevents(context, min, max, events, timeout);
        return count < 0 ? count : spoil(context, events, count, max);
    }

    static int destroy(aio_context_t context) { return base().destroy(context); }

    static const Calls& table() {
        static const Calls calls{base().name, setup, submit, getevents, destroy, /*patience=*/20};
        return calls;
    }
};

}  // namespace

void inject(std::vector<Fault> faults) {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    s.faults = std::move(faults);
}

size_t release_held() {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    std::erase_if(s.faults, [](const Fault& fault) { return fault.hold; });
    const size_t count = s.held.size();
    for (const Held& held : s.held) {
        const auto* block = reinterpret_cast<const iocb*>(held.event.obj);
        s.released.push_back(held);
        const uint64_t one = 1;
        (void)!write(static_cast<int>(block->aio_resfd), &one, sizeof one);
    }
    s.held.clear();
    return count;
}

const Calls& with_faults(const Calls& calls) {
    const std::lock_guard lock(state().mutex);
    if (state().faults.empty()) return calls;
    return &calls == available_calls()[0] ? Faulty<0>::table() : Faulty<1>::table();
}

}  // namespace infinity::aio
