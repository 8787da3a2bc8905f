// Prints "ok" if a thread of a normal job runs pieces of an urgent one before its own next piece.
//
// Two threads work on the normal job. Their first pieces wait until the urgent job has started; its other pieces wait
// until the urgent job has ended. The two pieces of the urgent job wait for each other. So one of the two threads must
// leave the normal job for the urgent one, or nothing ends.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <thread>

#include "adam/thread_pool.h"

namespace {

using infinity::adam::Priority;

class Gate {
  public:
    void count() {
        const std::lock_guard lock(mutex_);
        ++counted_;
        changed_.notify_all();
    }
    // Returns false if `wanted` calls of `count` do not happen in a time that no working pool needs.
    bool wait_for(int wanted) {
        std::unique_lock lock(mutex_);
        return changed_.wait_for(lock, std::chrono::seconds(30), [&] { return counted_ >= wanted; });
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    int counted_ = 0;
};

constexpr std::size_t kPieces = 8;
Gate normal_begun, urgent_begun, urgent_ended;
std::atomic<bool> failed = false;

void expect(bool value) {
    if (!value) failed = true;
}

}  // namespace

int main() {
    auto normal_piece = [](std::size_t k) {
        if (k == 0 || k == kPieces / 2) {  // first of each thread's share
            normal_begun.count();
            expect(urgent_begun.wait_for(1));
        } else {
            expect(urgent_ended.wait_for(1));
        }
    };
    auto urgent_piece = [](std::size_t) {
        urgent_begun.count();
        expect(urgent_begun.wait_for(2));
    };
    std::thread normal([&] { infinity::adam::parallel_for(kPieces, 2, Priority::kNormal, normal_piece); });
    expect(normal_begun.wait_for(2));
    infinity::adam::parallel_for(2, 2, Priority::kUrgent, urgent_piece);
    urgent_ended.count();
    normal.join();
    std::puts(failed ? "the urgent job waited for the normal one" : "ok");
}
