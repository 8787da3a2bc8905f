// The pool of native threads with pieces that sleep instead of computing, so that any number of threads run at once on
// any machine: bench/pool.py compiles it. Arguments: threads, pieces of an urgent job, passes. URGENT: a priority.
//
// Prints the median milliseconds of an urgent job beside normal ones, and the threads that work on average.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "adam/thread_pool.h"

using infinity::adam::Priority;
using Clock = std::chrono::steady_clock;

namespace {

constexpr std::chrono::microseconds kNormalPiece{1000}, kUrgentPiece{500};  // long beside the error of a sleep

double milliseconds(Clock::duration time) { return std::chrono::duration<double, std::milli>(time).count(); }

}  // namespace

int main(int, char** arguments) {
    const int threads = std::atoi(arguments[1]), pieces = std::atoi(arguments[2]), passes = std::atoi(arguments[3]);
    std::atomic<bool> stop = false;
    std::atomic<long> done = 0;
    auto normal_piece = [&](std::size_t) {
        std::this_thread::sleep_for(kNormalPiece);
        ++done;
    };
    auto urgent_piece = [](std::size_t) { std::this_thread::sleep_for(kUrgentPiece); };
    const auto start = Clock::now();
    std::thread updates([&] {
        while (!stop) infinity::adam::parallel_for(64 * threads, threads, Priority::kNormal, normal_piece);
    });
    std::vector<double> times;
    for (int pass = 0; pass < passes; ++pass) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        const auto before = Clock::now();
        infinity::adam::parallel_for(pieces, threads, Priority::URGENT, urgent_piece);
        times.push_back(milliseconds(Clock::now() - before));
    }
    stop = true;
    updates.join();
    std::nth_element(times.begin(), times.begin() + passes / 2, times.end());
    const double work = done * milliseconds(kNormalPiece) + 1.0 * passes * pieces * milliseconds(kUrgentPiece);
    std::printf("%f %f\n", times[passes / 2], work / milliseconds(Clock::now() - start));
}
