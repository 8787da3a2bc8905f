// Faults for the tests: a queue that passes on to a real one, and fails where it was told to.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "queue.h"

namespace infinity::aio {

struct Fault {
    // setup: no queue can be had. submit, reap: calls of that name return -error.
    // submit with `accept`: the call hands on so many operations at most.
    // block with `bytes`: an operation is shortened, so that the kernel itself makes a short transfer.
    // event with `error`: a completion's result becomes -error; with `hold`: it is kept back until release_held();
    // with `flip`: the first byte that was read is changed.
    std::string where;
    int error = 0;
    long accept = -1;
    long bytes = -1;
    bool hold = false;
    bool flip = false;
    unsigned above = 0;             // setup: only for more operations than that
    std::optional<Direction> only;  // block, event: only reads, or only writes
    long after = 0;                 // how many matches pass unharmed first
    long times = 1;                 // how many then do not; -1: all
    long seen = 0;
};

// Engines created from now on have these faults, shared; none at all when `faults` is empty.
void inject(std::vector<Fault> faults);
// Lets go of what `hold` keeps back, and holds nothing more. Returns how many completions there were.
size_t release_held();
// A queue of `backend`, with faults when there are any.
std::unique_ptr<Queue> open_queue(const Backend& backend, unsigned depth);

}  // namespace infinity::aio
