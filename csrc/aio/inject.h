// Faults for the tests: a table of calls that passes on to a real one, and fails where it was told to.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "calls.h"
#include "request.h"

namespace infinity::aio {

struct Fault {
    // setup, submit, getevents: calls of that name return -error.
    // submit with `accept`: the call hands on so many blocks at most.
    // block with `bytes`: a submitted block is shortened, so that the kernel itself makes a short transfer.
    // event with `error`: a completion's result becomes -error; with `hold`: it is kept back until release_held().
    std::string where;
    int error = 0;
    long accept = -1;
    long bytes = -1;
    bool hold = false;
    unsigned above = 0;             // setup: only when more events are asked for
    std::optional<Direction> only;  // block, event: only reads, or only writes
    long after = 0;                 // how many matches pass unharmed first
    long times = 1;                 // how many then do not; -1: all
    long seen = 0;
};

// Engines created from now on have these faults, shared; none at all when `faults` is empty.
void inject(std::vector<Fault> faults);
// Lets go of what `hold` keeps back, and holds nothing more. Returns how many completions there were.
size_t release_held();
// What an engine that wants `calls` gets.
const Calls& with_faults(const Calls& calls);

}  // namespace infinity::aio
