// Virtual time: each task gets its start and end when it is issued, from stated rates, and no kernel or copy runs.
//
// One host thread runs at a time, and `now` is its clock; tests/late/clock.py switches between them. A launch advances
// it, a wait sets it to the end of what is waited for.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace late {

enum class Lane : int32_t { compute, to_device, from_device, mark, host_work, wait_for_record, wait_for_thread, other };

// Seconds, and bytes or operations a second. The fields are those of `Rates` in tests/late/clock.py.
struct Rates {
    double launch;     // of the host, for a kernel or a copy
    double event;      // of the host, to record an event or to make a stream wait for one
    double kernel;     // least duration of a kernel or copy
    double device;     // memory of the device
    double half;       // operations of matrix products in 16 bits
    double single;     // in other formats
    double to_device;  // each direction of the link
    double from_device;
};

// The fields are those of `RECORD` in tests/late/clock.py.
struct Record {
    int32_t lane;
    int32_t thread;  // that issued it
    int32_t name;
    int32_t stream;
    double start;
    double end;
    int64_t bound;  // record whose end is the start; thread, for wait_for_thread; -1: the thread that issued it
};

// The work of a task on the device.
struct Cost {
    Lane lane = Lane::mark;
    double nbytes = 0;
    double operations = 0;
    bool half = false;
    std::string name;
};

struct Moment {
    double time = 0;
    int64_t record = -1;
};

// The scheduler's lock guards it.
class Clock {
  public:
    bool on = false;
    double now = 0;
    int32_t thread = 0;
    std::string label;  // name of kernels that are issued now; empty: that of their operator
    Rates rates{};
    std::vector<Record> records;
    std::vector<std::string> names;

    // Issues a task to a stream, after other tasks. Returns its end.
    Moment issue(Moment& stream, int32_t stream_id, const std::vector<Moment>& after, const Cost& cost) {
        now += cost.lane == Lane::mark ? rates.event : rates.launch;
        Moment begin{now, -1};
        if (stream.time >= begin.time) begin = stream;
        for (const auto& other : after) {
            if (other.time > begin.time) begin = other;
        }
        const double end = begin.time + seconds(cost);
        const auto name = name_of(cost.lane == Lane::compute && !label.empty() ? label : cost.name);
        return stream = {end, log(cost.lane, name, stream_id, begin.time, end, begin.record)};
    }

    // Advances the present thread to `until`; it waits there for a record or a thread.
    void wait(Lane lane, Moment until) {
        if (until.time <= now) return;
        log(lane, 0, 0, now, until.time, until.record);
        now = until.time;
    }

    int64_t log(Lane lane, int32_t name, int32_t stream, double start, double end, int64_t bound) {
        records.push_back({static_cast<int32_t>(lane), thread, name, stream, start, end, bound});
        return static_cast<int64_t>(records.size()) - 1;
    }

    int32_t name_of(const std::string& name) {
        const auto [found, fresh] = numbers_.try_emplace(name, static_cast<int32_t>(names.size()));
        if (fresh) names.push_back(name);
        return found->second;
    }

  private:
    double seconds(const Cost& cost) const {
        switch (cost.lane) {
            case Lane::to_device:
                return rates.kernel + cost.nbytes / rates.to_device;
            case Lane::from_device:
                return rates.kernel + cost.nbytes / rates.from_device;
            case Lane::compute: {
                const double rate = cost.half ? rates.half : rates.single;
                return std::max({rates.kernel, cost.nbytes / rates.device, cost.operations / rate});
            }
            default:
                return 0;
        }
    }

    std::map<std::string, int32_t> numbers_;
};

// Memory that is reserved and costs nothing until it is touched; zeros.
inline void* reserve_bytes(size_t nbytes) {
    void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? nullptr : memory;
}

}  // namespace late
