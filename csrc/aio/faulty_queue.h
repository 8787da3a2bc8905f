// Fault injection for tests: a queue that forwards to a real one and injects the configured faults.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "queue.h"

namespace infinity::aio {

struct Fault {
    // setup: opening a queue fails. submit, reap: the call returns -error.
    // submit with `accept`: the call forwards at most so many operations.
    // block with `bytes`: an operation is shortened, so that the kernel makes a short transfer.
    // event with `error`: a completion's result becomes -error; with `hold`: it is delayed until release_held();
    // with `flip`: the first byte read is changed.
    // block, event with `signal`: the process sends itself that signal. event with `milliseconds`: it is reported
    // later.
    std::string where;
    int error = 0;
    long accept = -1;
    long bytes = -1;
    bool hold = false;
    bool flip = false;
    int signal = 0;
    long milliseconds = 0;
    unsigned above = 0;             // setup: only for larger depths
    std::optional<Direction> only;  // block, event: only reads, or only writes
    long after = 0;                 // number of matches before the fault starts
    long times = 1;                 // number of faulty matches; -1: all
    long seen = 0;
};

// Injects `faults`, shared, into engines created from now on; an empty list ends it.
void inject(std::vector<Fault> faults);
// Releases the completions delayed by `hold`, ends those faults, and returns the number of completions.
size_t release_held();
// Returns the number of matches of each of the injected faults.
std::vector<long> matches();
// Returns a queue of `backend`, with the injected faults.
std::unique_ptr<Queue> open_queue(const Backend& backend, unsigned depth);

}  // namespace infinity::aio
