#include "inject.h"

#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <utility>

namespace infinity::aio {
namespace {

struct State {
    std::mutex mutex;
    std::vector<Fault> faults;
    std::vector<io_event> held;      // completions kept back
    std::vector<io_event> released;  // to be reported by the next getevents
    const Calls* base = nullptr;
    Calls table{};
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

int faulty_setup(unsigned events, aio_context_t* context) {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    if (const Fault* fault = strike("setup", nullptr, events)) return -fault->error;
    return s.base->setup(events, context);
}

int faulty_submit(aio_context_t context, long count, iocb** blocks) {
    State& s = state();
    {
        const std::lock_guard lock(s.mutex);
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
    return s.base->submit(context, count, blocks);
}

int faulty_getevents(aio_context_t context, long min, long max, io_event* events, timespec* timeout) {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    if (const Fault* fault = strike("getevents")) return -fault->error;
    const int count = s.base->getevents(context, min, max, events, timeout);
    int kept = 0;
    for (int i = 0; i < count; ++i) {
        const Fault* fault = strike("event", reinterpret_cast<const iocb*>(events[i].obj));
        if (fault && fault->hold) {
            s.held.push_back(events[i]);
            continue;
        }
        if (fault) events[i].res = -fault->error;
        events[kept++] = events[i];
    }
    while (count >= 0 && kept < max && !s.released.empty()) {
        events[kept++] = s.released.back();
        s.released.pop_back();
    }
    return count < 0 ? count : kept;
}

int faulty_destroy(aio_context_t context) { return state().base->destroy(context); }

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
    for (const io_event& event : s.held) {
        const auto* block = reinterpret_cast<const iocb*>(event.obj);
        s.released.push_back(event);
        const uint64_t one = 1;
        (void)!write(static_cast<int>(block->aio_resfd), &one, sizeof one);
    }
    s.held.clear();
    return count;
}

const Calls& with_faults(const Calls& calls) {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    if (s.faults.empty()) return calls;
    s.base = &calls;
    s.table = Calls{calls.name, faulty_setup, faulty_submit, faulty_getevents, faulty_destroy, /*patience=*/20};
    return s.table;
}

}  // namespace infinity::aio
