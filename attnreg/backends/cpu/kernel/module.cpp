// Attention on a CPU, as a library without Python and without torch: `torchlib/building.py` compiles it, `compiled.py`
// calls it. One file serves every torch, so a wheel can bring it.
//
// Sequences of any lengths are one call, cut into tasks that torch's threads take one after the other. Matrices
// are packed into panels (panels.h) in float32, whatever the dtype, and multiplied tile by tile (products.h).
//
// call.h: reading a call's arguments · problem.h: what it computes, and its tasks · vectors.h: vectors of the instruction
// set · dtypes.h: reading and writing them · panels.h: matrices · products.h: their products · options.h: ALiBi slopes
// and dropout · softmax.h: scores and their weights · key_sums.h: sums that tasks share · forward.h, backward.h: what a
// task computes · few_rows.h: the forward of few rows, as in decoding · tiles.h, forward_tiles.h, backward_tiles.h: the
// same in bfloat16 by AMX

#include <atomic>
#include <cmath>
#include <new>

#include "backward.h"
#include "backward_tiles.h"
#include "call.h"
#include "forward.h"
#include "forward_tiles.h"

#if defined(ATTNREG_FOR_WHEELS) && defined(__x86_64__)
// glibc before 2.29 has the other versions of these alone, which report errors in one more way.
asm(".symver log, log@GLIBC_2.2.5\n.symver log2, log2@GLIBC_2.2.5");
#endif

namespace attnreg {

// Computing so many scores takes as long as waking a thread does, at common head dims.
constexpr double kScoresPerThread = 4096;

// Torch's threads, by functions of its C interface: `torch_get_num_threads` and `torch_parallel_for` of
// torch/csrc/stable/c/shim.h, which return 0 where they succeed. Until `attnreg_use_threads` a call has one thread.
struct Threads {
  int32_t (*get_count)(uint32_t* count);
  int32_t (*run)(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
} torchs_threads{};

int64_t get_num_threads() {
  uint32_t count = 1;
  return torchs_threads.get_count && torchs_threads.get_count(&count) == 0 ? count : 1;
}

// Runs a function once in each of `threads` threads of torch, or once in all where this is one of its threads already.
template <class Body>
void in_threads(int64_t threads, const Body& body) {
  struct Run {
    const Body& body;
    std::atomic<bool> no_memory{false}, failed{false};
  } run{body};
  // No exception may pass through torch's C functions. What a wheel brings can't copy one, as old systems' libraries of C++
  // have no function for it that new compilers call.
  const auto one_thread = [](int64_t, int64_t, void* context) {
    Run& run = *static_cast<Run*>(context);
    try {
      run.body();
    } catch (const std::bad_alloc&) {
      run.no_memory = true;
    } catch (...) {
      run.failed = true;
    }
  };
  const int32_t status = torchs_threads.run(0, threads, 1, one_thread, &run);
  if (run.no_memory) {
    throw std::bad_alloc();
  }
  if (run.failed || status) {
    throw kNoThreads;
  }
}

// Runs the tasks 0 to `count` in torch's own threads, each with a worker of its own.
template <class Make, class Work>
void in_parallel(int64_t count, double cost, Make&& make, Work&& work) {
  std::atomic<int64_t> next{0};
  const auto take = [&] {
    auto worker = make();
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      work(worker, i);
    }
  };
  const int64_t worth = std::min(cost / kScoresPerThread, 1e6);
  const int64_t threads = std::min<int64_t>({count, get_num_threads(), worth});
  threads < 2 ? take() : in_threads(threads, take);
}

double cost_of(const std::vector<Task>& tasks, int64_t group) {
  double cost = 0;
  for (const Task& task : tasks) {
    cost += task.cost(group);
  }
  return cost;
}

// The tasks of a forward, of at most `most` rows, a multiple of `step`; of fewer where there are many threads. Under a
// window the blocks of keys begin at the first key that a task sees, so that the task of a row shows in its bits.
std::vector<Task> forward_tasks(const Problem& problem, int64_t most, int64_t step) {
  const int64_t group = problem.group(), threads = get_num_threads();
  int64_t rows = 0;
  for (int64_t i = 0; i < problem.count; i++) {
    rows += problem.sequences[i].rows * problem.heads;
  }
  if (threads > 1 && !problem.batch_invariant) {
    most = std::clamp(padded(rows / (threads * 4), step), step, most);
  }
  std::vector<Task> tasks;
  for (int64_t i = 0; i < problem.count; i++) {
    const Sequence& sequence = problem.sequences[i];
    const int64_t all = sequence.rows * group, pieces = (all + most - 1) / most;
    const int64_t piece = pieces < 2 ? all : padded((all + pieces - 1) / pieces, step);
    for (int64_t head = 0; head < problem.key_heads; head++) {
      for (int64_t row = 0; row < all; row += piece) {
        tasks.push_back({&sequence, head, row, std::min(piece, all - row)});
      }
    }
  }
  sort(tasks, group);
  return tasks;
}

#ifdef ATTNREG_TILES
// Whether AMX computes a call; its workers leave out short sequences, and large scores in the backward, themselves.
bool takes_tiles(const Problem& problem) {
  const auto fits = [](int64_t size) { return size % kTileSteps == 0 && size <= 256; };
  const Scale scale(problem);
  const bool is_usual = !scale.is_capped && !problem.slopes && problem.dropout == 0.0 && scale.sign == 1.0f &&
                        scale.to_exponent < 16.0f;
  return problem.dtype == 1 && fits(problem.size) && fits(problem.value_size) && is_usual && TileUnit::is_there();
}
#endif

template <class Worker>
void forward_by(const Problem& problem) {
  const auto tasks = forward_tasks(problem, Worker::kRows, Worker::kStep);
  in_parallel(
      tasks.size(), cost_of(tasks, problem.group()), [&] { return Worker(problem); },
      [&](Worker& worker, int64_t i) { worker.run(tasks[i]); });
}

// A head, or a chunk of the rows of a shared one.
struct Part {
  Task head;
  SharedHead* shared;
  int64_t chunk;
};

template <class Worker>
void backward_by(const Problem& problem) {
  const int64_t group = problem.group(), threads = get_num_threads();
  std::vector<Task> heads;
  for (int64_t i = 0; i < problem.count; i++) {
    for (int64_t head = 0; head < problem.key_heads; head++) {
      heads.push_back({&problem.sequences[i], head, 0, problem.sequences[i].rows * group});
    }
  }
  sort(heads, group);
  const double cost = cost_of(heads, group);
  // A head that takes longer than three quarters of a thread's share is shared out.
  const double most = threads < 2 ? cost : 0.75 * cost / double(threads);
  std::vector<SharedHead> shared;
  std::vector<Task> rest;
  for (const Task& head : heads) {
    const int64_t chunks = Worker::chunks(head);
    if (chunks > 1 && head.cost(group) > most) {
      shared.emplace_back(head, chunks, KeySums::size(problem, *head.sequence));
    } else {
      rest.push_back(head);
    }
  }
  std::vector<Part> parts;
  // A chunk comes after the chunk that it waits for, and after as many other tasks as possible.
  for (int64_t chunk = 0, before = -1; before < int64_t(parts.size()); chunk++) {
    before = parts.size();
    for (SharedHead& each : shared) {
      if (chunk < each.chunks) {
        parts.push_back({each.head, &each, chunk});
      }
    }
  }
  for (const Task& head : rest) {
    parts.push_back({head, nullptr, 0});
  }
  in_parallel(
      parts.size(), cost, [&] { return Worker(problem); },
      [&](Worker& worker, int64_t i) {
        const auto& [head, shared, chunk] = parts[i];
        return shared ? worker.run(*shared, chunk) : worker.run(head);
      });
}

// Runs a body for the problem that a call is, and its dtype; no exception may leave.
template <class Body>
int64_t run_call(const void* context, const NativeCall* call, bool is_forward, Body&& body) {
  try {
    const Kind& kind = *static_cast<const Kind*>(context);
    CallReader reader(kind, *call, is_forward);
    if (const Status status = reader.read(); status != kDone) {
      return status;
    }
    const auto run = [&](auto number) {
      reader.fill_rest<decltype(number)>();
      body(number, reader.problem());
    };
    kind.dtype == 0 ? run(Float32()) : kind.dtype == 1 ? run(BFloat16()) : run(Float16());
    return kDone;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (...) {
    return kNoThreads;
  }
}

}  // namespace attnreg

extern "C" {

// The name of its file, without the suffix: whoever loads the file compares both.
const char* attnreg_library() {
  return ATTNREG_LIBRARY;
}

// Has calls run in torch's threads, see `Threads`.
void attnreg_use_threads(decltype(attnreg::Threads::get_count) get_count, decltype(attnreg::Threads::run) run) {
  attnreg::torchs_threads = {get_count, run};
}

// Whether bfloat16 is multiplied by AMX where that is possible.
int64_t attnreg_has_tiles() {
#ifdef ATTNREG_TILES
  return attnreg::TileUnit::is_there();
#else
  return false;
#endif
}

// Return a `Status`: 0 where the call has run. Any thread may call them; `context` is a `Kind`.
int64_t attnreg_forward(const void* context, const attnreg::NativeCall* call) {
  return attnreg::run_call(context, call, true, [](auto number, const attnreg::Problem& problem) {
#ifdef ATTNREG_TILES
    if (attnreg::takes_tiles(problem)) {
      return attnreg::forward_by<attnreg::TileForward>(problem);
    }
#endif
    attnreg::forward_by<attnreg::Forward<decltype(number)>>(problem);
  });
}

int64_t attnreg_backward(const void* context, const attnreg::NativeCall* call) {
  return attnreg::run_call(context, call, false, [](auto number, const attnreg::Problem& problem) {
#ifdef ATTNREG_TILES
    if (attnreg::takes_tiles(problem)) {
      return attnreg::backward_by<attnreg::TileBackward>(problem);
    }
#endif
    attnreg::backward_by<attnreg::Backward<decltype(number)>>(problem);
  });
}
}
