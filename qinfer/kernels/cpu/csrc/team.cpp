// The persistent thread team that runs programs.
//
// The caller is thread 0. The others sleep on a condition variable between programs and are woken
// once per program; between the ops of a program all meet at a spinning barrier.
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

#include "active.h"

namespace qinfer {
namespace {

// Spins before a waiting thread lets others run: where cores are shared, the thread that it waits
// for may need this one.
constexpr int kSpins = 4000;

inline void pause_briefly() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#endif
}

// All `size` threads arrive, then all go on.
class Barrier {
 public:
  explicit Barrier(int32_t size) : size_(size) {}

  void arrive_and_wait() {
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (spins < kSpins) {
        pause_briefly();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  const int32_t size_;
  alignas(64) std::atomic<int32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

class Team {
 public:
  // Starts threads - 1 threads; throws std::system_error if the system has none left.
  explicit Team(int32_t threads) : size_(threads), barrier_(threads) {
    try {
      for (int32_t i = 1; i < threads; ++i) members_.emplace_back([this, i] { serve(i); });
    } catch (...) {
      stop();
      throw;
    }
  }

  ~Team() { stop(); }

  int32_t size() const { return size_; }

  void run(const qinfer_op* ops, int64_t num_ops) {
    if (size_ > 1) {
      std::lock_guard<std::mutex> lock(mutex_);
      ops_ = ops;
      num_ops_ = num_ops;
      kernels_ = active();
      ++generation_;
      wake_.notify_all();
    } else {
      kernels_ = active();
    }
    work(0, kernels_, ops, num_ops);
  }

 private:
  void work(int32_t thread, const Kernels* kernels, const qinfer_op* ops, int64_t num_ops) {
    for (int64_t i = 0; i < num_ops; ++i) {
      kernels->ops[ops[i].kind](ops[i].args, thread, size_);
      if (size_ > 1) barrier_.arrive_and_wait();
    }
  }

  void serve(int32_t thread) {
    uint64_t seen = 0;
    for (;;) {
      const qinfer_op* ops;
      const Kernels* kernels;
      int64_t num_ops;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
        if (stopping_) return;
        seen = generation_;
        ops = ops_;
        num_ops = num_ops_;
        kernels = kernels_;
      }
      work(thread, kernels, ops, num_ops);
    }
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& member : members_) member.join();
  }

  const int32_t size_;
  Barrier barrier_;
  std::mutex mutex_;
  std::condition_variable wake_;
  const qinfer_op* ops_ = nullptr;
  int64_t num_ops_ = 0;
  const Kernels* kernels_ = nullptr;
  uint64_t generation_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> members_;
};

bool known(const qinfer_op* ops, int64_t num_ops) {
  for (int64_t i = 0; i < num_ops; ++i) {
    if (ops[i].kind <= 0 || ops[i].kind >= QINFER_OP_KINDS || ops[i].args == nullptr) return false;
  }
  return true;
}

}  // namespace
}  // namespace qinfer

extern "C" int32_t qinfer_run(const qinfer_op* ops, int64_t num_ops, int32_t threads) {
  if (num_ops < 0 || (num_ops > 0 && ops == nullptr) || threads < 1 ||
      !qinfer::known(ops, num_ops)) {
    return QINFER_BAD_ARGUMENT;
  }
  static std::mutex busy;
  // Never destroyed: at exit its threads may be gone already, and joining them would hang.
  static std::unique_ptr<qinfer::Team>& team = *new std::unique_ptr<qinfer::Team>();
  std::lock_guard<std::mutex> lock(busy);
  if (team == nullptr || team->size() != threads) {
    team.reset();
    try {
      team = std::make_unique<qinfer::Team>(threads);
    } catch (const std::system_error&) {
      return QINFER_NO_THREADS;
    }
  }
  team->run(ops, num_ops);
  return QINFER_OK;
}
