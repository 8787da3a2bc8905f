// A persistent pool of threads that sleep when there is nothing to do.
//
// A call is a job of `count` pieces. Each of its threads begins with a share of its own, pieces that lie beside each
// other, and goes on with what is left of the others' shares. A worker keeps its place among the shares from call to
// call, so that it finds in its caches and in its node's memory what it worked on before, as far as the system leaves
// it where it is. The caller never waits for a worker that has not begun, so a busy machine (the update runs beside
// torch's own threads) costs a helper but no latency. Jobs of several calling threads share the workers. After fork()
// the child starts with a new, empty pool.
#pragma once

#include <cstddef>

namespace infinity::adam {

// Calls body(context, k) once for each k in [0, count), on at most `threads` threads, and returns when all are done.
// `body` must not throw and must not depend on which thread runs it.
void parallel_for(std::size_t count, int threads, void (*body)(void* context, std::size_t k), void* context);

template <class Body>
void parallel_for(std::size_t count, int threads, Body& body) {
    parallel_for(count, threads, [](void* context, std::size_t k) { (*static_cast<Body*>(context))(k); }, &body);
}

// The number of processors that the calling thread may run on.
int default_threads();

// To be called once, when the module is loaded.
void install_fork_handler();

}  // namespace infinity::adam
