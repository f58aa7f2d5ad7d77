// SPDX-License-Identifier: Apache-2.0
// Ranks of several hosts as threads of this process: a queue with a thread of its own for each rank's stream, rails of
// the fake NCCL, and for the inner pass of a host one layer on the CPU, for the tokens of all its ranks.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/bf16.hpp"
#include "expert_parallel/hosts/rotation.hpp"
#include "tessera/moe.hpp"
#include "tests/expert_parallel/fake_nccl.hpp"

namespace tessera::expert_parallel::hosts {

using Bits = std::uint16_t;  // of bf16

// A stream: what is enqueued runs on its thread, one after the other.
class Queue final : public FakeQueue {
 public:
  Queue() : thread_([this] { run(); }) {}
  Queue(Queue const&) = delete;
  Queue& operator=(Queue const&) = delete;
  ~Queue() {
    enqueue([this] { ended_ = true; });
    thread_.join();
  }
  void enqueue(std::function<void()> work) override {
    std::lock_guard const lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_one();
  }
  void drain() {
    auto const done = std::make_shared<std::atomic<bool>>(false);  // outlives who waits
    enqueue([done] {
      *done = true;
      done->notify_one();
    });
    done->wait(false);
  }

 private:
  void run() {
    while (!ended_) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !work_.empty(); });
      auto const work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      work();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool ended_ = false;  // of its own thread
  std::thread thread_;
};

inline void enqueue(Stream stream, std::function<void()> work) {
  static_cast<Queue*>(stream.native)->enqueue(std::move(work));
}

inline std::atomic<bool> all_capture = false;

// Kernels of rows.cuh as loops; events are words.
inline StreamCalls fake_stream_calls() {
  using Event = std::atomic<bool>;
  return {.choose =
              [](ChooseTokens const& p, Stream stream) noexcept {
                enqueue(stream, [p] {
                  for (std::int32_t h = 0; h < p.hosts; ++h) {
                    std::int32_t place = 0;
                    for (std::int64_t t = 0; t < p.tokens; ++t) {
                      bool const goes = p.goes(t, h);
                      p.gmem_place[h * p.tokens + t] = goes ? place : -1;
                      if (goes) {
                        p.gmem_token[h * p.tokens + place++] = static_cast<std::int32_t>(t);
                      }
                    }
                    p.gmem_counts[h] = place;
                  }
                });
                return Status();
              },
          .pack =
              [](PackRows const& p, Stream stream) noexcept {
                enqueue(stream, [p] {
                  for (std::int64_t row = 0; row < p.rows; ++row) {
                    std::int64_t const token = p.token_of(row), bytes = 16 * p.words;
                    if (p.gmem_rows != nullptr) {
                      char* const to = static_cast<char*>(p.gmem_rows) + row * bytes;
                      auto const* const x = static_cast<char const*>(p.gmem_x);
                      std::memset(to, 0, static_cast<std::size_t>(bytes));
                      if (token >= 0) {
                        std::memcpy(to, x + token * bytes, static_cast<std::size_t>(bytes));
                      }
                    }
                    for (std::int32_t k = 0; k < p.top_k; ++k) p.pack_choice(row, token, k);
                  }
                });
                return Status();
              },
          .sum =
              [](SumPartials const& p, Stream stream) noexcept {
                enqueue(stream, [p] {
                  for (std::int64_t i = 0; i < p.tokens * p.columns; ++i) {
                    p.fp32 ? p.sum<float>(i / p.columns, i % p.columns)
                           : p.sum<core::Bf16>(i / p.columns, i % p.columns);
                  }
                });
                return Status();
              },
          .read =
              [](void* host, void const* from, std::size_t bytes, Stream stream) noexcept {
                enqueue(stream, [=] { std::memcpy(host, from, bytes); });
                return Status();
              },
          .write =
              [](void* to, void const* host, std::size_t bytes, Stream stream) noexcept {
                auto const* const begin = static_cast<char const*>(host);
                std::vector<char> const copy(begin, begin + bytes);
                enqueue(stream, [=] { std::memcpy(to, copy.data(), bytes); });
                return Status();
              },
          .captures = [](Stream) noexcept -> Expected<bool> { return all_capture.load(); },
          .make_event = []() noexcept -> Expected<void*> {
            return static_cast<void*>(new Event(false));
          },
          .record =
              [](void* event, Stream stream) noexcept {
                *static_cast<Event*>(event) = false;
                enqueue(stream, [event] { *static_cast<Event*>(event) = true; });
                return Status();
              },
          .host_memory = [](std::size_t bytes) noexcept -> Expected<void*> {
            return ::operator new(bytes);
          },
          .passed = [](void* event) noexcept -> Expected<bool> {
            return static_cast<Event*>(event)->load();
          },
          .free_event = [](void* event) noexcept { delete static_cast<Event*>(event); },
          .free_host_memory = [](void* host) noexcept { ::operator delete(host); },
          .stand_beside_captures = []() noexcept {}};
}

inline DeviceCalls fake_device_calls() {
  DeviceCalls calls;
  calls.use = [](std::int32_t, ContextChoice) noexcept -> Expected<void*> {
    return static_cast<void*>(nullptr);
  };
  calls.restore = [](void*) noexcept {};
  calls.synchronize = []() noexcept { return Status(); };
  return calls;
}

inline StreamCalls const kStream = fake_stream_calls();
inline DeviceCalls const kDevice = fake_device_calls();

inline FakeMessages& messages_of_nccl() {
  void* const library = dlopen(FAKE_NCCL_PATH, RTLD_NOW);
  return *reinterpret_cast<FakeMessages* (*)()>(dlsym(library, "fake_messages"))();
}

// Tensors of all ranks. Tokens of rank r = h*P + g begin at begins[r].
struct Problem {
  std::int32_t hosts, ranks;  // ranks: of each host
  std::vector<std::int64_t> tokens;
  std::int32_t experts, top_k;  // of all hosts
  std::int64_t hidden = 16, intermediate = 8, max_tokens = 0;
  std::vector<std::int64_t> begins = {0};
  std::vector<std::int32_t> ids = {};  // [T,K]
  std::vector<float> scores = {};
  std::vector<Bits> x = {}, d_o = {}, w_up = {}, w_down = {};
};

struct Gradients {
  std::vector<float> up, down;  // of one host's experts
};

// What one pass of a host's experts on tokens [begin,end) leaves and makes.
class HostLayer {
 public:
  HostLayer(Problem const& problem, std::int32_t host) : problem_(problem), host_(host) {
    auto made = Context::create({.num_threads = 1});
    context_ = std::make_unique<Context>(std::move(made).value());
    gradients_.up.resize(problem.w_up.size() / static_cast<std::size_t>(problem.hosts));
    gradients_.down.resize(problem.w_down.size() / static_cast<std::size_t>(problem.hosts));
  }
  [[nodiscard]] Gradients const& gradients() const { return gradients_; }

  struct Saved {
    std::vector<Bits> x, h;
    std::vector<std::byte> routing;
    std::int64_t tokens = 0;
  };
  Status forward(std::vector<Bits> const& x, std::vector<std::int32_t> const& ids,
                 std::vector<float> const& scores, std::vector<Bits>& o, Saved& saved) const {
    MoeDesc const desc = desc_of(static_cast<std::int64_t>(ids.size()) / problem_.top_k);
    MoeShape const& s = desc.shape;
    saved = {x, {}, {}, s.tokens};
    saved.h.resize(static_cast<std::size_t>(s.tokens * s.top_k * 2 * s.intermediate));
    saved.routing.resize(routing_bytes(desc).value());
    o.assign(x.size(), 0xffff);
    std::vector<std::byte> workspace(workspace_bytes(*context_, desc, Pass::forward).value());
    return moe_forward(*context_, desc,
                       {.x = bf16(x, {s.tokens, s.hidden}),
                        .topk_ids = tensor(ids.data(), {s.tokens, s.top_k}),
                        .topk_weights = tensor(scores.data(), {s.tokens, s.top_k}),
                        .weights = weights(),
                        .o = bf16(o, {s.tokens, s.hidden}),
                        .h = bf16(saved.h, {s.tokens * s.top_k, 2 * s.intermediate}),
                        .routing = {saved.routing.data(), saved.routing.size()},
                        .workspace = {workspace.data(), workspace.size()}});
  }
  Status backward(std::vector<Bits> const& d_o, Saved& saved, std::vector<Bits>& dx,
                  std::vector<float>& dscores) {
    MoeDesc const desc = desc_of(saved.tokens);
    MoeShape const& s = desc.shape;
    dx.assign(d_o.size(), 0xffff);
    dscores.assign(static_cast<std::size_t>(s.tokens * s.top_k), -1);
    std::int64_t const experts = s.experts, n = s.intermediate, d = s.hidden;
    std::vector<std::byte> workspace(workspace_bytes(*context_, desc, Pass::backward).value());
    return moe_backward(*context_, desc,
                        {.d_o = bf16(d_o, {s.tokens, d}),
                         .x = bf16(saved.x, {s.tokens, d}),
                         .h = bf16(saved.h, {s.tokens * s.top_k, 2 * n}),
                         .routing = {saved.routing.data(), saved.routing.size()},
                         .weights = weights(),
                         .dx = bf16(dx, {s.tokens, d}),
                         .dscores = tensor(dscores.data(), {s.tokens * s.top_k}),
                         .gradients = {.dw_up = tensor(gradients_.up.data(), {experts, 2 * n, d}),
                                       .dw_down = tensor(gradients_.down.data(), {experts, d, n}),
                                       .mode = GradientMode::accumulate},
                         .workspace = {workspace.data(), workspace.size()}});
  }

 private:
  [[nodiscard]] MoeDesc desc_of(std::int64_t tokens) const {
    MoeDesc desc;
    desc.shape.tokens = tokens;
    desc.shape.hidden = problem_.hidden;
    desc.shape.intermediate = problem_.intermediate;
    desc.shape.experts = problem_.experts / problem_.hosts;
    desc.shape.top_k = problem_.top_k;
    desc.dtype = DType::bf16;
    return desc;
  }
  static ConstTensor bf16(std::vector<Bits> const& values,
                          std::initializer_list<std::int64_t> shape) {
    return tensor(static_cast<void const*>(values.data()), DType::bf16, shape);
  }
  static Tensor bf16(std::vector<Bits>& values, std::initializer_list<std::int64_t> shape) {
    return tensor(static_cast<void*>(values.data()), DType::bf16, shape);
  }
  [[nodiscard]] ExpertWeights weights() const {
    std::int64_t const experts = problem_.experts / problem_.hosts, n = problem_.intermediate;
    std::int64_t const d = problem_.hidden;
    auto const of = [](std::vector<Bits> const& all, std::int64_t begin) {
      return static_cast<void const*>(all.data() + begin);
    };
    return {.w_up = tensor(of(problem_.w_up, host_ * experts * 2 * n * d), DType::bf16,
                           {experts, 2 * n, d}),
            .w_down =
                tensor(of(problem_.w_down, host_ * experts * n * d), DType::bf16, {experts, d, n})};
  }

  Problem const& problem_;
  std::int32_t host_;
  std::unique_ptr<Context> context_;
  Gradients gradients_;
};

// The ranks of one host in its inner passes: the last one that comes makes the pass for all.
class SharedHost {
 public:
  SharedHost(Problem const& problem, std::int32_t host)
      : problem_(problem),
        layer_(problem, host),
        parts_(static_cast<std::size_t>(problem.ranks)),
        saved_(static_cast<std::size_t>(problem.hosts)),
        barrier_(problem.ranks) {}
  [[nodiscard]] HostLayer const& layer() const { return layer_; }
  std::atomic<bool> failed = false;

  void forward(std::int32_t rank, InnerForward const& p) {
    parts_[static_cast<std::size_t>(rank)] = {
        p.tokens, p.gmem_x, p.gmem_topk_ids, p.gmem_topk_weights, p.gmem_o, nullptr};
    barrier_.arrive_and_wait();
    if (rank == 0) {
      std::vector<Bits> x, o;
      std::vector<std::int32_t> ids;
      std::vector<float> scores;
      for (Part const& part : parts_) {
        append(x, part.rows, part.tokens * problem_.hidden);
        append(ids, part.ids, part.tokens * problem_.top_k);
        append(scores, part.scores, part.tokens * problem_.top_k);
      }
      auto& saved = saved_[static_cast<std::size_t>(p.step)];
      failed = failed || !layer_.forward(x, ids, scores, o, saved).ok();
      give(o, {});
    }
    barrier_.arrive_and_wait();
  }
  void backward(std::int32_t rank, InnerBackward const& p) {
    parts_[static_cast<std::size_t>(rank)] = {p.tokens, p.gmem_d_o, p.gmem_topk_ids,
                                              nullptr,  p.gmem_dx,  p.gmem_dscores};
    barrier_.arrive_and_wait();
    if (rank == 0) {
      std::vector<Bits> d_o, dx;
      std::vector<float> dscores;
      for (Part const& part : parts_) append(d_o, part.rows, part.tokens * problem_.hidden);
      auto& saved = saved_[static_cast<std::size_t>(p.step)];
      failed = failed || !layer_.backward(d_o, saved, dx, dscores).ok();
      give(dx, dscores);
    }
    barrier_.arrive_and_wait();
  }

 private:
  struct Part {
    std::int64_t tokens;
    void const* rows;
    std::int32_t const* ids;
    float const* scores;
    void* result;
    float* dscores;
  };
  template <class T>
  static void append(std::vector<T>& all, void const* part, std::int64_t count) {
    auto const* const begin = static_cast<T const*>(part);
    all.insert(all.end(), begin, begin + count);
  }
  void give(std::vector<Bits> const& rows, std::vector<float> const& dscores) const {
    std::int64_t begin = 0;
    for (Part const& part : parts_) {
      auto const bytes = static_cast<std::size_t>(2 * part.tokens * problem_.hidden);
      if (bytes > 0) std::memcpy(part.result, rows.data() + begin * problem_.hidden, bytes);
      if (!dscores.empty()) {
        std::memcpy(part.dscores, dscores.data() + begin * problem_.top_k,
                    static_cast<std::size_t>(4 * part.tokens * problem_.top_k));
      }
      begin += part.tokens;
    }
  }

  Problem const& problem_;
  HostLayer layer_;
  std::vector<Part> parts_;
  std::vector<HostLayer::Saved> saved_;  // [step]
  std::barrier<> barrier_;
};

class InnerRank final : public InnerPass {
 public:
  InnerRank(SharedHost& host, std::int32_t rank) : host_(host), rank_(rank) {}
  Status forward(InnerForward const& p, Stream stream) noexcept override {
    enqueue(stream, [this, p] { host_.forward(rank_, p); });
    return {};
  }
  Status backward(InnerBackward const& p, Stream stream) noexcept override {
    enqueue(stream, [this, p] { host_.backward(rank_, p); });
    return {};
  }

 private:
  SharedHost& host_;
  std::int32_t rank_;
};

}  // namespace tessera::expert_parallel::hosts
