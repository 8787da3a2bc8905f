#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#ifdef __linux__
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace infinity::adam {
namespace {

// Time that a background job has for each of its pieces before its caller takes part. On an idle processor, a piece of
// an update takes about a tenth of it.
constexpr std::chrono::microseconds kPatience{500};
constexpr int kBackgroundNice = 10;  // added to the process's own

// Unclaimed pieces [next, end) of a job. Aligned to a cache line to avoid false sharing.
struct alignas(64) Share {
    std::atomic<std::size_t> next;
    std::size_t end;
};

struct Job {
    std::size_t count;
    void (*body)(void*, std::size_t);
    void* context;
    bool urgent;
    int places;  // threads that may still join; guarded by the pool's mutex
    std::vector<Share> shares;
    std::atomic<std::size_t> finished{0};  // pieces done
    std::mutex mutex;
    std::condition_variable all_finished;

    Job(std::size_t count, void (*body)(void*, std::size_t), void* context, bool urgent, int places)
        : count(count),
          body(body),
          context(context),
          urgent(urgent),
          places(places),
          shares(static_cast<std::size_t>(places) + 1) {
        const std::size_t each = count / shares.size(), longer = count % shares.size();
        std::size_t begin = 0;
        for (std::size_t k = 0; k < shares.size(); ++k) {
            shares[k].next.store(begin, std::memory_order_relaxed);
            shares[k].end = begin += each + (k < longer ? 1 : 0);
        }
    }

    // Claims and runs pieces until none is left, starting with share number `first`. Calls `before` before each claim.
    // `context` is valid while a claimed piece is unfinished.
    template <class Before>
    void work(std::size_t first, const Before& before) {
        std::size_t done = 0;
        for (std::size_t turn = 0; turn < shares.size(); ++turn) {
            Share& share = shares[(first + turn) % shares.size()];
            for (;; ++done) {
                before();
                const std::size_t k = share.next.fetch_add(1, std::memory_order_relaxed);
                if (k >= share.end) break;
                body(context, k);
            }
        }
        if (done == 0) return;
        if (finished.fetch_add(done, std::memory_order_acq_rel) + done == count) {
            std::lock_guard lock(mutex);  // prevents a lost wake-up of the caller
            all_finished.notify_one();
        }
    }

    void wait() {
        std::unique_lock lock(mutex);
        all_finished.wait(lock, [this] { return is_finished(); });
    }

    // Returns false if pieces are unfinished after `time`.
    bool wait_for(std::chrono::microseconds time) {
        std::unique_lock lock(mutex);
        return all_finished.wait_for(lock, time, [this] { return is_finished(); });
    }

    bool is_finished() const { return finished.load(std::memory_order_acquire) == count; }
};

class Pool {
  public:
    explicit Pool(Priority priority) : priority_(priority) {}

    void run(const std::shared_ptr<Job>& job) {
        const int helpers = job->places;
        bool waits = priority_ == Priority::kBackground;
        {
            std::lock_guard lock(mutex_);
            grow(helpers);
            waits = waits && workers_ > 0;
            const auto at = job->urgent ? jobs_.begin() + urgent_.load(std::memory_order_relaxed) : jobs_.end();
            jobs_.insert(at, job);
            if (job->urgent) urgent_.fetch_add(1, std::memory_order_relaxed);
        }
        for (int k = 0; k < helpers; ++k) wake_.notify_one();
        if (!waits || !job->wait_for(kPatience * static_cast<long>(job->count))) work(*job, 0);
        {
            std::lock_guard lock(mutex_);  // a worker may have removed it already
            const auto at = std::find(jobs_.begin(), jobs_.end(), job);
            if (at != jobs_.end()) remove(at);
        }
        job->wait();
    }

  private:
    using Jobs = std::deque<std::shared_ptr<Job>>;

    // Runs pieces of `job`. A thread of one that is not urgent joins urgent jobs between two pieces.
    void work(Job& job, std::size_t first) {
        job.work(first, [&] {
            if (job.urgent || urgent_.load(std::memory_order_relaxed) == 0) return;
            std::unique_lock lock(mutex_);
            while (!jobs_.empty() && jobs_.front()->urgent) join(lock, first);
        });
    }

    // Takes a place of the first job and works on it, without the lock.
    void join(std::unique_lock<std::mutex>& lock, std::size_t first) {
        const std::shared_ptr<Job> job = jobs_.front();
        if (--job->places == 0) remove(jobs_.begin());
        lock.unlock();
        work(*job, first);
        lock.lock();
    }

    void remove(Jobs::iterator at) {
        if ((*at)->urgent) urgent_.fetch_sub(1, std::memory_order_relaxed);
        jobs_.erase(at);
    }

    // Starts workers up to `wanted`, or fewer if the system refuses a thread, which only reduces speed.
    void grow(int wanted) {
        sigset_t all, before;  // blocks signals, which are for the program's own threads
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (; workers_ < wanted; ++workers_) std::thread(&Pool::serve, this, workers_ + 1).detach();
        } catch (const std::system_error&) {
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    // Body of worker number 1, 2, ...
    void serve(int number) {
#ifdef __linux__
        pthread_setname_np(pthread_self(), "infinity-adam");
        if (priority_ == Priority::kBackground) {
            const auto self = static_cast<id_t>(syscall(SYS_gettid));  // Linux keeps a priority for each thread
            setpriority(PRIO_PROCESS, self, getpriority(PRIO_PROCESS, self) + kBackgroundNice);
        }
#endif
        std::unique_lock lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return !jobs_.empty(); });
            join(lock, static_cast<std::size_t>(number));
        }
    }

    const Priority priority_;
    std::mutex mutex_;
    std::condition_variable wake_;
    Jobs jobs_;                   // that a thread may still join, urgent ones first
    std::atomic<int> urgent_{0};  // of `jobs_`; written under the lock
    int workers_ = 0;
};

// For background jobs [1] and all others [0]. Never destroyed: their threads sleep until the process ends. A forked
// child leaks them, since their threads do not exist there and their mutexes may be locked for ever.
std::atomic<Pool*> pools[2]{};

Pool& get_pool(Priority priority) {
    std::atomic<Pool*>& pool = pools[priority == Priority::kBackground];
    Pool* current = pool.load(std::memory_order_acquire);
    if (current != nullptr) return *current;
    Pool* const fresh = new Pool(priority);
    if (pool.compare_exchange_strong(current, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;  // another thread has created one
    return *current;
}

}  // namespace

void parallel_for(std::size_t count, int threads, Priority priority, void (*body)(void*, std::size_t), void* context) {
    const int wanted = static_cast<int>(std::min(static_cast<std::size_t>(std::max(threads, 1)), count));
    const int helpers = priority == Priority::kBackground ? wanted : wanted - 1;
    if (helpers <= 0 || count == 1) {
        for (std::size_t k = 0; k < count; ++k) body(context, k);
        return;
    }
    get_pool(priority).run(std::make_shared<Job>(count, body, context, priority == Priority::kUrgent, helpers));
}

int default_threads() {
#ifdef __linux__
    for (int cpus = 1024; cpus <= (1 << 20); cpus *= 2) {  // the kernel rejects a set smaller than its own
        const std::size_t bytes = CPU_ALLOC_SIZE(cpus);
        const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(cpus), [](cpu_set_t* s) { CPU_FREE(s); });
        if (set == nullptr) break;
        if (sched_getaffinity(0, bytes, set.get()) == 0) return std::max(1, CPU_COUNT_S(bytes, set.get()));
    }
#endif
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void install_fork_handler() {
    pthread_atfork(nullptr, nullptr, [] {
        for (std::atomic<Pool*>& pool : pools) pool.store(nullptr, std::memory_order_release);
    });
}

}  // namespace infinity::adam
