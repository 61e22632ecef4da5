// Threads that wait for work: a publish makes a call for every tensor, and each thread keeps a workspace of megabytes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <unistd.h>

namespace flowtrain {

class Pool {
  public:
    // The pool of this process; a forked child has none of its parent's threads. It is never destroyed, since they wait in it.
    static Pool& of_process() {
        static std::atomic<Pool*> current{nullptr};
        Pool* pool = current.load();
        if (!pool || pool->owner_ != getpid()) {
            std::unique_ptr<Pool> fresh(new Pool);
            if (current.compare_exchange_strong(pool, fresh.get())) pool = fresh.release();
        }
        return *pool;
    }

    // Run task(0) here and task(1), ... task(count - 1) on threads; returns when all have ended. A task must not throw.
    void run(std::size_t count, const std::function<void(std::size_t)>& task) {
        Call call{task, count - 1};
        std::vector<Share> shares;
        for (std::size_t i = 1; i < count; ++i) shares.push_back({&call, i});
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            waiting_.insert(waiting_.end(), shares.begin(), shares.end());
            while (num_idle_ < waiting_.size() && start()) {}
        }
        wake_.notify_all();
        task(0);
        std::unique_lock<std::mutex> lock(mutex_);
        while (call.num_left > 0) {
            if (waiting_.empty()) call.done.wait(lock);
            else work(lock);  // the threads are busy, or there are none
        }
    }

  private:
    struct Call {
        const std::function<void(std::size_t)>& task;
        std::size_t num_left;
        std::condition_variable done{};
    };
    struct Share {
        Call* call;
        std::size_t number;
    };

    bool start() {
        try {
            std::thread(&Pool::serve, this).detach();
        } catch (const std::system_error&) {
            return false;  // no more threads are available
        }
        ++num_idle_;
        return true;
    }

    void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            wake_.wait(lock, [this] { return !waiting_.empty(); });
            --num_idle_;
            work(lock);
            ++num_idle_;
        }
    }

    void work(std::unique_lock<std::mutex>& lock) {
        const Share share = waiting_.front();
        waiting_.pop_front();
        lock.unlock();
        share.call->task(share.number);
        lock.lock();
        if (--share.call->num_left == 0) share.call->done.notify_one();
    }

    const pid_t owner_ = getpid();
    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<Share> waiting_;
    std::size_t num_idle_ = 0;  // threads that are started and have no share
};

}  // namespace flowtrain
