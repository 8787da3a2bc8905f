// A persistent pool of threads, which sleep when idle.
//
// A call is a job of `count` pieces. Each thread starts with its own share of adjacent pieces, then steals from the
// shares of others. A worker has the same share in every call, so that its data is in its caches and on its NUMA node
// unless the scheduler moves it. The caller never waits for a worker that has not started, so that a busy machine (the
// update runs concurrently with torch's threads) adds no latency. Jobs of several calling threads share the workers.
//
// Urgent jobs are short passes that another thread waits for. Threads in a normal job join an urgent one before their
// next piece, so that it does not wait until an update of many pieces has ended. The work of both stays the same.
//
// Background jobs have workers of their own, with a lower priority (nice 10 above the process). They use the time that
// other threads leave idle, such as those of torch's operations, which end with their slowest thread. The caller sleeps
// meanwhile. It takes part after a while, if other programs leave too little time.
//
// After fork() the child starts with new, empty pools.
#pragma once

#include <cstddef>

namespace infinity::adam {

enum class Priority { kUrgent, kNormal, kBackground };

// Calls body(context, k) once for each k in [0, count), on at most `threads` threads, and returns when all are done.
// `body` must not throw and must not depend on which thread runs it.
void parallel_for(std::size_t count, int threads, Priority priority, void (*body)(void* context, std::size_t k),
                  void* context);

template <class Body>
void parallel_for(std::size_t count, int threads, Priority priority, Body& body) {
    parallel_for(
        count, threads, priority, [](void* context, std::size_t k) { (*static_cast<Body*>(context))(k); }, &body);
}

// Returns the number of processors that the calling thread may run on.
int default_threads();

// Call once, when the module is loaded.
void install_fork_handler();

}  // namespace infinity::adam
