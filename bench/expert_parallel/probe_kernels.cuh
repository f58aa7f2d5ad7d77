// SPDX-License-Identifier: Apache-2.0
// The kernels of the probe: rows pulled and pushed by bulk copies, round trips of flags, barriers over
// two GPUs. Words hold epochs, which only grow; every wait gives up after five seconds and says where.
#pragma once

#include "../../src/cuda/arch/bulk_copy.cuh"
#include "../../src/cuda/arch/clock.cuh"
#include "../../src/cuda/arch/proxy_fence.cuh"
#include "../../src/cuda/arch/signal.cuh"
#include "../../src/cuda/arch/tma.cuh"

namespace tessera::bench {

namespace arch = cuda::arch;

// A GPU's window, alike on both. x is what peers pull, slots what peers push to; the pool is local.
struct Window {
  static constexpr int64_t kRegion = int64_t{512} << 20;
  static constexpr int64_t kWords = 0;  // one word per 128 bytes
  static constexpr int64_t kPayload = 1 << 20;
  static constexpr int64_t kX = 2 << 20;
  static constexpr int64_t kPool = kX + kRegion;
  static constexpr int64_t kSlots = kPool + kRegion;
  static constexpr int64_t kBytes = kSlots + kRegion;
};
enum class Word : int { kStart, kPing, kBarrierPeer, kBarrierCount, kBarrierGo, kNumWords };
__host__ __device__ inline uint32_t* word(char* window, Word w) {
  return reinterpret_cast<uint32_t*>(window + Window::kWords + 128 * int(w));
}

struct Fault {
  uint32_t site, expected, seen;  // site 0: none
};
enum class Site : uint32_t {
  kNone,
  kStart,
  kPing,
  kLocalPing,
  kPayload,
  kBarrierCount,
  kBarrierPeer
};
inline char const* site_name(uint32_t site) {
  constexpr char const* kNames[] = {"none",    "start",         "ping",        "local ping",
                                    "payload", "barrier count", "barrier peer"};
  return kNames[site];
}

struct Ends {
  char* local;
  char* peer;
  int rank;
  Fault* fault;
};

constexpr uint64_t kLimitNs = 5'000'000'000;

enum class Order { kAcquireSys, kRelaxedSys, kAcquireGpu };

template <Order kOrder>
__device__ __forceinline__ uint32_t load_word(uint32_t const* w) {
  if constexpr (kOrder == Order::kAcquireSys) return arch::load_acquire_sys(w);
  if constexpr (kOrder == Order::kRelaxedSys) return arch::load_relaxed_sys(w);
  return arch::load_acquire_gpu(w);
}
template <Order kOrder>
__device__ __forceinline__ void store_word(uint32_t* w, uint32_t value) {
  if constexpr (kOrder == Order::kAcquireSys) arch::store_release_sys(w, value);
  if constexpr (kOrder == Order::kRelaxedSys) arch::store_relaxed_sys(w, value);
  if constexpr (kOrder == Order::kAcquireGpu) arch::store_release_gpu(w, value);
}

// False once the limit has passed here, or a wait elsewhere on this GPU has failed.
template <Order kOrder>
__device__ bool wait_for(uint32_t const* w, uint32_t epoch, Fault* fault, Site site) {
  uint64_t begin = 0;
  for (int spin = 1;; ++spin) {
    uint32_t const seen = load_word<kOrder>(w);
    if (int32_t(seen - epoch) >= 0) return true;
    if (spin % 1024 != 0) continue;
    if (begin == 0) begin = arch::nanoseconds();
    bool const late = arch::nanoseconds() - begin > kLimitNs;
    if (late && atomicCAS(&fault->site, 0u, uint32_t(site)) == 0) {
      fault->expected = epoch;
      fault->seen = seen;
    }
    if (late || *static_cast<uint32_t volatile*>(&fault->site) != 0) return false;
  }
}

// What word i of a GPU's x holds, and of the shared memory it pushes from.
__host__ __device__ inline uint32_t pattern(int rank, uint32_t i) {
  return (i + 1) * 2654435761u + uint32_t(rank) * 0x85ebca6bu;
}
__global__ void fill_pattern(uint32_t* gmem, int64_t count, int rank) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    gmem[i] = pattern(rank, uint32_t(i));
  }
}

struct Move {
  Ends ends;
  int message;        // bytes, a power of two >= 512
  int ring;           // bytes of shared memory in each direction
  int pulls, pushes;  // messages of each CTA
  bool rendezvous;    // start together with the peer
  uint32_t epoch;
  uint64_t* gmem_times;  // [CTAs][3]: begin, pulls done, pushes done
  __host__ __device__ int stage() const { return message > ring / 4 ? message : ring / 4; }
};

// Message m goes to or comes from place(m): rows in scattered order, each once.
__host__ __device__ inline int64_t place(uint32_t m, int message) {
  uint32_t const mask = uint32_t(Window::kRegion / message) - 1;
  return int64_t((m * 0x9e3779b1u) & mask) * message;
}

// peer's x -> shared memory -> pool, `stages` stages in flight; the lanes of one warp issue.
__device__ void pull(Move const& p, char* smem, arch::Mbarrier* full) {
  int const lane = threadIdx.x % 32;
  int const stages = p.ring / p.stage();
  int const lanes = p.stage() / p.message;  // messages of a stage
  int const batches = p.pulls / lanes;
  auto const message = [&](int batch) {
    return uint32_t(batch * lanes + lane) * gridDim.x + blockIdx.x;
  };
  auto const load = [&](int batch) {
    int const stage = batch % stages;
    if (lane == 0) arch::mbarrier_arrive_expect_tx(&full[stage], p.stage());
    __syncwarp();
    if (lane < lanes) {
      arch::bulk_load(smem + stage * p.stage() + lane * p.message,
                      p.ends.peer + Window::kX + place(message(batch), p.message), p.message,
                      &full[stage]);
    }
  };
  for (int batch = 0; batch < stages && batch < batches; ++batch) load(batch);
  for (int batch = 0; batch < batches; ++batch) {
    int const stage = batch % stages;
    arch::mbarrier_wait(&full[stage], (batch / stages) & 1);
    if (lane < lanes) {
      arch::bulk_store(p.ends.local + Window::kPool + int64_t{message(batch)} * p.message,
                       smem + stage * p.stage() + lane * p.message, p.message);
      arch::tma_store_commit();
    }
    // Refill the stage whose stores were issued one batch ago: they have read it by now.
    int const refill = stages > 1 ? batch - 1 : batch;
    if (refill >= 0 && refill + stages < batches) {
      if (stages > 1) {
        arch::tma_store_wait_read<1>();
      } else {
        arch::tma_store_wait_read<0>();
      }
      __syncwarp();
      load(refill + stages);
    }
  }
  arch::bulk_store_wait<0>();
  __syncwarp();
}

// shared memory -> peer's slots.
__device__ void push(Move const& p, char const* smem) {
  int const lane = threadIdx.x % 32;
  int const stages = p.ring / p.stage();
  int const lanes = p.stage() / p.message;
  for (int batch = 0; batch < p.pushes / lanes; ++batch) {
    uint32_t const m = uint32_t(batch * lanes + lane) * gridDim.x + blockIdx.x;
    if (lane < lanes) {
      arch::bulk_store(p.ends.peer + Window::kSlots + place(m, p.message),
                       smem + (batch % stages) * p.stage() + lane * p.message, p.message);
      arch::tma_store_commit();
      arch::tma_store_wait_read<1>();
    }
  }
  arch::bulk_store_wait<0>();
  __syncwarp();
}

// Warp 0 pulls, warp 1 pushes.
__global__ void __launch_bounds__(64) move(Move const p) {
  extern __shared__ __align__(128) char smem[];  // pull ring, push ring
  __shared__ arch::Mbarrier full[4];
  auto* const smem_push = reinterpret_cast<uint32_t*>(smem + p.ring);
  for (int i = threadIdx.x; i < p.ring / 4; i += blockDim.x) {
    smem_push[i] = pattern(p.ends.rank, uint32_t(i));
  }
  if (threadIdx.x == 0) {
    for (arch::Mbarrier& barrier : full) arch::mbarrier_init(&barrier, 1);
    arch::mbarrier_fence_init();
    if (p.rendezvous) {
      if (blockIdx.x == 0) {
        arch::store_release_sys(word(p.ends.peer, Word::kStart), p.epoch);
      }
      wait_for<Order::kAcquireSys>(word(p.ends.local, Word::kStart), p.epoch, p.ends.fault,
                                   Site::kStart);
    }
    p.gmem_times[3 * blockIdx.x] = arch::nanoseconds();
  }
  arch::fence_proxy_async_shared();
  __syncthreads();
  if (threadIdx.x / 32 == 0) {
    pull(p, smem, full);
    if (threadIdx.x == 0) p.gmem_times[3 * blockIdx.x + 1] = arch::nanoseconds();
  } else {
    push(p, smem + p.ring);
    if (threadIdx.x == 32) p.gmem_times[3 * blockIdx.x + 2] = arch::nanoseconds();
  }
}

// Counts words of pool and slots that are not what `p` on both sides should have left there.
__global__ void check_move(Move const p, int ctas, unsigned long long* wrong) {
  int const words = p.message / 4;
  auto const* const pool = reinterpret_cast<uint32_t const*>(p.ends.local + Window::kPool);
  auto const* const slots = reinterpret_cast<uint32_t const*>(p.ends.local + Window::kSlots);
  unsigned long long mine = 0;
  for (int64_t m = blockIdx.x; m < int64_t{p.pulls} * ctas; m += gridDim.x) {
    for (int w = threadIdx.x; w < words; w += blockDim.x) {
      uint32_t const source = uint32_t(place(uint32_t(m), p.message) / 4) + w;
      mine += pool[m * words + w] != pattern(1 - p.ends.rank, source);
    }
  }
  for (int64_t m = blockIdx.x; m < int64_t{p.pushes} * ctas; m += gridDim.x) {
    for (int w = threadIdx.x; w < words; w += blockDim.x) {
      int64_t const in_ring = (m / ctas * p.message) % (p.ring / p.stage() * p.stage());
      mine += slots[place(uint32_t(m), p.message) / 4 + w] !=
              pattern(1 - p.ends.rank, uint32_t(in_ring / 4) + w);
    }
  }
  if (mine != 0) atomicAdd(wrong, mine);
}

// Rank 0 sends, rank 1 answers, `rounds` times. gmem_ns: duration of all.
template <Order kOrder>
__global__ void ping(Ends const ends, uint32_t epoch, int rounds, uint64_t* gmem_ns) {
  uint32_t* const mine = word(ends.local, Word::kPing);
  uint32_t* const theirs = word(ends.peer, Word::kPing);
  uint64_t const begin = arch::nanoseconds();
  for (int i = 0; i < rounds; ++i) {
    if (ends.rank == 0) store_word<kOrder>(theirs, epoch + i);
    if (!wait_for<kOrder>(mine, epoch + i, ends.fault, Site::kPing)) return;
    if (ends.rank == 1) store_word<kOrder>(theirs, epoch + i);
  }
  *gmem_ns = arch::nanoseconds() - begin;
}

// The same between two CTAs of one GPU.
__global__ void local_ping(Ends const ends, uint32_t epoch, int rounds, uint64_t* gmem_ns) {
  uint32_t* const mine = word(ends.local, blockIdx.x == 0 ? Word::kStart : Word::kPing);
  uint32_t* const theirs = word(ends.local, blockIdx.x == 0 ? Word::kPing : Word::kStart);
  uint64_t const begin = arch::nanoseconds();
  for (int i = 0; i < rounds; ++i) {
    if (blockIdx.x == 0) arch::store_release_gpu(theirs, epoch + i);
    if (!wait_for<Order::kAcquireGpu>(mine, epoch + i, ends.fault, Site::kLocalPing)) return;
    if (blockIdx.x == 1) arch::store_release_gpu(theirs, epoch + i);
  }
  if (blockIdx.x == 0) *gmem_ns = arch::nanoseconds() - begin;
}

// How a payload goes, when it is announced, and how it is read.
enum class Payload {
  kBulk,            // bulk store, wait until written, release; read by loads
  kBulkReadByBulk,  // the same; read by a bulk load after acquire and proxy fence
  kBulkNoWait,      // announced when shared memory was read: a mutant, stale reads may be seen
  kStores,          // 16-byte stores of a warp, a fence of each lane, release by one
};

// Ping-pong of `bytes` (<= 16 KB) that are checked on arrival; one warp.
template <Payload kPayload>
__global__ void __launch_bounds__(32)
    ping_payload(Ends const ends, uint32_t epoch, int rounds, int bytes, uint64_t* gmem_ns,
                 unsigned* gmem_stale) {
  __shared__ alignas(128) uint4 smem_out[1024];
  __shared__ alignas(128) uint4 smem_in[1024];
  __shared__ arch::Mbarrier full;
  int const lane = threadIdx.x;
  int const chunks = bytes / 16;
  auto* const out = reinterpret_cast<uint4*>(ends.peer + Window::kPayload);
  auto const* const in = reinterpret_cast<uint4 const*>(ends.local + Window::kPayload);
  if (lane == 0) {
    arch::mbarrier_init(&full, 1);
    arch::mbarrier_fence_init();
  }
  __syncwarp();
  unsigned stale = 0;
  uint64_t const begin = arch::nanoseconds();
  for (int i = 0; i < 2 * rounds; ++i) {
    uint32_t const tag = epoch + i;
    if (i % 2 == ends.rank) {
      if constexpr (kPayload == Payload::kStores) {
        for (int c = lane; c < chunks; c += 32) out[c] = make_uint4(tag, tag, tag, tag);
        arch::fence_acq_rel_sys();
        __syncwarp();
      } else {
        for (int c = lane; c < chunks; c += 32) smem_out[c] = make_uint4(tag, tag, tag, tag);
        arch::fence_proxy_async_shared();
        __syncwarp();
        if (lane == 0) {
          arch::bulk_store(out, smem_out, bytes);
          arch::tma_store_commit();
          if constexpr (kPayload == Payload::kBulkNoWait) {
            arch::tma_store_wait_read<0>();
          } else {
            arch::bulk_store_wait<0>();
          }
        }
      }
      if (lane == 0) arch::store_release_sys(word(ends.peer, Word::kPing), tag);
    } else {
      bool arrived = true;
      if (lane == 0) {
        arrived = wait_for<Order::kAcquireSys>(word(ends.local, Word::kPing), tag, ends.fault,
                                               Site::kPayload);
      }
      if (!__shfl_sync(0xffffffffu, arrived, 0)) return;
      uint4 const* from = in;
      if constexpr (kPayload == Payload::kBulkReadByBulk) {
        if (lane == 0) {
          arch::fence_proxy_async_global();
          arch::mbarrier_arrive_expect_tx(&full, bytes);
          arch::bulk_load(smem_in, in, bytes, &full);
        }
        __syncwarp();
        arch::mbarrier_wait(&full, (i / 2) & 1);
        from = smem_in;
      }
      for (int c = lane; c < chunks; c += 32) {
        uint4 const v = from[c];
        stale += (v.x != tag) + (v.y != tag) + (v.z != tag) + (v.w != tag);
      }
      __syncwarp();
      // smem_in is read by loads, then written by the async proxy.
      if constexpr (kPayload == Payload::kBulkReadByBulk) arch::fence_proxy_async_shared();
    }
  }
  if (lane == 0) *gmem_ns = arch::nanoseconds() - begin;
  if (stale != 0) atomicAdd(gmem_stale, stale);
}

// Barriers over all CTAs of both GPUs. gmem_ns: the first, which waits for the peer's launch, and the rest.
__global__ void barriers(Ends const ends, uint32_t epoch, int rounds, uint64_t* gmem_ns) {
  if (threadIdx.x != 0) return;
  uint32_t* const count = word(ends.local, Word::kBarrierCount);
  uint64_t const begin = arch::nanoseconds();
  uint64_t after_first = begin;
  for (int i = 0; i < rounds; ++i) {
    uint32_t const now = epoch + i;
    if ((arch::count_acq_rel_gpu(count, 1) + 1) % gridDim.x == 0) {
      arch::store_release_sys(word(ends.peer, Word::kBarrierPeer), now);
    }
    // Every CTA of this GPU is in when the last one has released the peer, so one word from there and
    // one from here are enough.
    if (!wait_for<Order::kAcquireSys>(word(ends.local, Word::kBarrierPeer), now, ends.fault,
                                      Site::kBarrierPeer)) {
      return;
    }
    if (!wait_for<Order::kAcquireGpu>(count, (now - epoch + 1) * gridDim.x, ends.fault,
                                      Site::kBarrierCount)) {
      return;
    }
    if (i == 0) after_first = arch::nanoseconds();
  }
  if (blockIdx.x == 0) {
    gmem_ns[0] = after_first - begin;
    gmem_ns[1] = arch::nanoseconds() - after_first;
  }
}

// Loads `words` words of the peer's x again and again until `ns` have passed, and counts the rounds.
__global__ void read_peer(Ends const ends, uint64_t ns, int words, uint64_t* gmem_rounds) {
  auto const* const x = reinterpret_cast<uint32_t const*>(ends.peer + Window::kX);
  uint64_t const begin = arch::nanoseconds();
  uint64_t rounds = 0;
  uint32_t wrong = 0;
  while (arch::nanoseconds() - begin < ns) {
    for (int i = threadIdx.x; i < words; i += blockDim.x) {
      wrong += arch::load_relaxed_sys(x + i) != pattern(1 - ends.rank, uint32_t(i));
    }
    ++rounds;
  }
  if (threadIdx.x == 0) gmem_rounds[0] = rounds;
  if (wrong != 0) atomicAdd(reinterpret_cast<unsigned long long*>(gmem_rounds + 1), 1ull);
}

}  // namespace tessera::bench
