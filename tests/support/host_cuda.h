// What a CUDA kernel needs to be compiled for a CPU: each thread of a block is a thread, blocks run in turns.
#include <array>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(count)

struct Index { unsigned x; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
thread_local Index threadIdx;
Index blockIdx, blockDim;
std::unique_ptr<std::barrier<>> together;
std::atomic<unsigned> gathered[32];
std::atomic<bool> trapped;

template <class T, class U> auto max(T a, U b) { return a > b ? a : b; }
template <class T, class U> auto min(T a, U b) { return a < b ? a : b; }
inline float __int_as_float(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline void __threadfence_system() {}
inline void __trap() { trapped = true; pthread_exit(nullptr); }

// All threads of the block add bits to a word, and get it.
inline unsigned gather(unsigned place, unsigned bits) {
  gathered[place] |= bits;
  together->arrive_and_wait();
  const unsigned all = gathered[place];
  together->arrive_and_wait();
  gathered[place] = 0;
  together->arrive_and_wait();
  return all;
}
inline unsigned __ballot_sync(unsigned, bool vote) { return gather(threadIdx.x / 32, unsigned{vote} << threadIdx.x % 32); }
inline bool __syncthreads_or(bool vote) { return gather(0, vote) != 0; }
inline bool __syncthreads_and(bool vote) { return gather(0, !vote) == 0; }

template <size_t... N> void call(void* kernel, const int64_t* words, std::index_sequence<N...>) {
  reinterpret_cast<void (*)(decltype(int64_t(N))...)>(kernel)(words[N]...);
}
template <size_t Count> void call_with(void* kernel, const int64_t* words) {
  call(kernel, words, std::make_index_sequence<Count>());
}

// Run a kernel, whose arguments are words, pointers among them; false if a thread trapped.
extern "C" bool run_on_host(void* kernel, int64_t grid, int64_t block, const int64_t* words, int64_t count) {
  static constexpr auto calls = []<size_t... N>(std::index_sequence<N...>) {
    return std::array<void (*)(void*, const int64_t*), sizeof...(N)>{call_with<N>...};
  }(std::make_index_sequence<32>());
  trapped = false;
  blockDim.x = static_cast<unsigned>(block);
  for (int64_t each = 0; each < grid; each++) {
    blockIdx.x = static_cast<unsigned>(each);
    together = std::make_unique<std::barrier<>>(block);
    std::vector<std::thread> threads;
    for (int64_t n = 0; n < block; n++) {
      threads.emplace_back([=] {
        threadIdx.x = static_cast<unsigned>(n);
        calls[count](kernel, words);
      });
    }
    for (auto& thread : threads) {
      thread.join();
    }
  }
  return !trapped;
}
