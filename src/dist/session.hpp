// SPDX-License-Identifier: Apache-2.0
// One rank of a group, ready to make passes: its windows, its workspace, the word that says what went wrong. No CUDA
// headers: a build without CUDA has the same functions (not_built.cpp), which say so.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "dist/engine.hpp"
#include "dist/fault.hpp"
#include "dist/plan.hpp"
#include "tessera/context.hpp"
#include "tessera/shape.hpp"

namespace tessera::dist {

struct SessionConfig {
  ExchangeShape shape;
  Activation activation;
  std::int32_t rank = 0, device = 0, sm_count = 0;
  std::array<void*, kMaxRanks> windows = {};
  void* workspace = nullptr;
  double time_limit = 0;  // seconds
};

/// Checked tensors of one pass; shapes as in ExpertParallelArgs.
struct PassTensors {
  std::int32_t tokens = 0;
  void const* gmem_x = nullptr;
  std::int64_t x_pitch = 0;  // elements
  std::int32_t const* gmem_topk_ids = nullptr;
  float const* gmem_topk_weights = nullptr;
  void const* gmem_w_up = nullptr;
  void const* gmem_w_down = nullptr;
  void* gmem_o = nullptr;

  /// Elements from row to row; of one row x_pitch may be anything.
  [[nodiscard]] std::int64_t pitch(std::int64_t hidden) const noexcept {
    return tokens == 1 ? hidden : x_pitch;
  }
};

/// Whether x is the rows in its place in the window, so that nothing is copied there.
inline bool is_in_place(PassTensors const& pass, std::int64_t hidden,
                        void const* window_x) noexcept {
  return pass.tokens == 0 || (pass.gmem_x == window_x && pass.pitch(hidden) == hidden);
}

class Session {
 public:
  static std::size_t workspace_bytes(ExchangeShape const& shape, std::int32_t sm_count) noexcept;
  /// Prepares the workspace; it is ready on return.
  static Expected<std::unique_ptr<Session>> open(SessionConfig const& config) noexcept;
  Session(Session const&) = delete;
  Session& operator=(Session const&) = delete;
  ~Session();

  [[nodiscard]] void* x() const noexcept;
  Status forward(PassTensors const& tensors, Stream stream) noexcept;
  [[nodiscard]] Status fault() const noexcept;

 private:
  explicit Session(SessionConfig const& config) noexcept : config_(config) {}

  SessionConfig config_;
  Fault* fault_ = nullptr;  // pinned
};

}  // namespace tessera::dist
