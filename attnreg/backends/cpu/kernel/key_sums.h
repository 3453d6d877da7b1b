// The gradients of key and value of a head, to which all its rows add, if need be those of several threads.

#pragma once

#include <atomic>
#include <thread>

#include "problem.h"

namespace attnreg {

// The sums of the gradients of key and value of one head of a sequence.
struct KeySums {
  Panels k, v;

  static int64_t size(const Problem& problem, const Sequence& sequence) {
    return (Panels::size(problem.size, 1) + Panels::size(problem.value_size, 1)) * height_of(sequence);
  }

  static KeySums in(float* memory, const Problem& problem, const Sequence& sequence) {
    const int64_t height = height_of(sequence);
    return {{memory, height}, {memory + Panels::size(problem.size, height), height}};
  }

 private:
  // Blocks of keys begin at any key, so their last tiles may reach beyond the last one.
  static int64_t height_of(const Sequence& sequence) { return padded(sequence.keys, kTileRows) + 32; }
};

// A head of a sequence whose chunks of rows are tasks of several threads. All add to the same sums, to each key in
// the order of the chunks: sums of each thread would take memory, and the results would depend on the threads.
class SharedHead {
 public:
  static constexpr int64_t kEnd = std::numeric_limits<int64_t>::max();

  SharedHead(const Task& head, int64_t chunks, int64_t floats)
      : head(head), chunks(chunks), sums_(allocated(std::calloc(floats, sizeof(float)))),
        added_(new std::atomic<int64_t>[chunks]()) {}

  float* sums() const { return sums_.get(); }
  void free_sums() { sums_.reset(); }

  // Waits until the chunks before this one have added all that they add to keys before `end`. Tasks are taken in
  // the order of the chunks, so these are done, or other threads are at them.
  void wait(int64_t chunk, int64_t end) const {
    while (chunk > 0 && added_[chunk - 1].load(std::memory_order_acquire) < end) {
      std::this_thread::yield();
    }
  }
  void set_added(int64_t chunk, int64_t end) { added_[chunk].store(end, std::memory_order_release); }

  const Task head;
  const int64_t chunks;

 private:
  Memory sums_;
  std::unique_ptr<std::atomic<int64_t>[]> added_;
};

// When a chunk adds to sums of keys before some key; those of a head that isn't shared never wait.
struct ChunkOrder {
  SharedHead* shared = nullptr;
  int64_t chunk = 0;

  void wait(int64_t end) const {
    if (shared) {
      shared->wait(chunk, end);
    }
  }
  void set_added(int64_t end) const {
    if (shared) {
      shared->set_added(chunk, end);
    }
  }
};

}  // namespace attnreg
