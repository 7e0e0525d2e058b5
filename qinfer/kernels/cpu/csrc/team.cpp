// The persistent thread team that runs programs.
//
// The caller is thread 0. The others sleep between programs and are woken once per program; between
// the ops of a program all meet at a spinning barrier. No thread is bound to a core: the system
// knows better what else runs.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <signal.h>
#define QINFER_POSIX
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#define QINFER_X86
#endif

#include "active.h"

namespace qinfer {
namespace {

// Spins before a waiting thread lets others run, about two microseconds: the thread that it waits for
// may need this very core.
constexpr int kSpins = 64;

// How long a member goes on looking for the next program before it sleeps. Decoding calls again and
// again, and to wake a sleeping core takes longer than several ops.
constexpr std::chrono::microseconds kLinger{200};

inline void spin(int turn) {
  if (turn >= kSpins) {
    std::this_thread::yield();
    return;
  }
#if defined(QINFER_X86)
  _mm_pause();
#endif
}

// The default floating-point mode, for as long as it lives: a caller that flushes denormals would
// otherwise get other bits for its share of the work than its team.
class DefaultRounding {
 public:
#if defined(QINFER_X86)
  DefaultRounding() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultRounding() { _mm_setcsr(saved_); }

 private:
  const unsigned saved_;
#else
  DefaultRounding() {}
#endif
};

// Blocks all signals for as long as it lives: threads made meanwhile leave them to the program.
class NoSignals {
 public:
#if defined(QINFER_POSIX)
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &saved_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }

 private:
  sigset_t saved_;
#else
  NoSignals() {}
#endif
};

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
    for (int turn = 0; phase_.load(std::memory_order_acquire) == phase;) {
      spin(turn);
      if (turn < kSpins) ++turn;
    }
  }

 private:
  const int32_t size_;
  alignas(64) std::atomic<int32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

struct Job {
  const Kernels* kernels;
  const qinfer_op* ops;
  int64_t num_ops;
};

class Team {
 public:
  // Starts threads - 1 threads; throws std::system_error if the system has none left.
  explicit Team(int32_t threads) : size_(threads), barrier_(threads) {
    const NoSignals no_signals;
    try {
      for (int32_t i = 1; i < threads; ++i) members_.emplace_back([this, i] { serve(i); });
    } catch (...) {
      stop();
      throw;
    }
  }

  ~Team() { stop(); }

  int32_t size() const { return size_; }

  // Runs a job of at least one op. Every member has copied it before the first barrier, so the next
  // call may overwrite it.
  void run(const Job& job) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = job;
      generation_.store(generation_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    }
    wake_.notify_all();
    work(0, job);
  }

 private:
  void work(int32_t thread, const Job& job) {
    const DefaultRounding rounding;
    for (int64_t i = 0; i < job.num_ops; ++i) {
      job.kernels->ops[job.ops[i].kind](job.ops[i].args, thread, size_);
      barrier_.arrive_and_wait();
    }
  }

  void serve(int32_t thread) {
    for (uint64_t seen = 0; await(seen); ++seen) {
      const Job job = job_;
      work(thread, job);
    }
  }

  // Waits for the job after the `seen`-th, at first awake and then asleep; false = stop.
  bool await(uint64_t seen) {
    if (seen > 0) {
      const auto until = std::chrono::steady_clock::now() + kLinger;
      do {
        for (int turn = 0; turn <= kSpins; ++turn) {
          if (generation_.load(std::memory_order_acquire) != seen) return true;
          spin(turn);
        }
      } while (std::chrono::steady_clock::now() < until);
    }
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [&] { return stopping_ || generation_.load() != seen; });
    return !stopping_;
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
  Job job_{};
  alignas(64) std::atomic<uint64_t> generation_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::vector<std::thread> members_;
};

struct State {
  std::mutex busy;
  std::unique_ptr<Team> team;
};

// Never destroyed: at exit its threads may be gone already, and joining them would hang.
State* state = nullptr;

// In the child of a fork only the forking thread lives on: the team's threads and whoever held the
// lock are gone. What they left is dropped, not destroyed.
void renew() {
  alignas(State) static unsigned char storage[sizeof(State)];
  state = new (storage) State();
}

bool prepare() {
  renew();
#if defined(QINFER_POSIX)
  pthread_atfork(nullptr, nullptr, renew);
#endif
  return true;
}

bool valid_program(const qinfer_op* ops, int64_t num_ops) {
  for (int64_t i = 0; i < num_ops; ++i) {
    if (!valid_op(ops[i])) return false;
  }
  return true;
}

void run_alone(const Job& job) {
  const DefaultRounding rounding;
  for (int64_t i = 0; i < job.num_ops; ++i) {
    job.kernels->ops[job.ops[i].kind](job.ops[i].args, 0, 1);
  }
}

}  // namespace
}  // namespace qinfer

extern "C" int32_t qinfer_run(const qinfer_op* ops, int64_t num_ops, int32_t threads) {
  if (num_ops < 0 || (num_ops > 0 && ops == nullptr) || threads < 1 ||
      threads > QINFER_MAX_THREADS || !qinfer::valid_program(ops, num_ops)) {
    return QINFER_BAD_ARGUMENT;
  }
  if (num_ops == 0) return QINFER_OK;
  static const bool prepared = qinfer::prepare();
  static_cast<void>(prepared);
  qinfer::State& state = *qinfer::state;
  std::lock_guard<std::mutex> lock(state.busy);
  const qinfer::Job job{qinfer::active(), ops, num_ops};
  if (threads == 1) {
    qinfer::run_alone(job);
    return QINFER_OK;
  }
  if (state.team == nullptr || state.team->size() != threads) {
    state.team.reset();
    try {
      state.team = std::make_unique<qinfer::Team>(threads);
    } catch (const std::system_error&) {
      return QINFER_NO_THREADS;
    } catch (const std::bad_alloc&) {
      return QINFER_NO_THREADS;
    }
  }
  state.team->run(job);
  return QINFER_OK;
}
