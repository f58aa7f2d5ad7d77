// SPDX-License-Identifier: Apache-2.0
// A pass over the experts of H hosts: in step s = 0 .. H-1 host h computes for the tokens of host (h+s) mod H
// (tessera/hosts.hpp), by an inner pass of the ranks of one host. One stream, one after the other:
//   pass 0 | rows of step 1, pass 1, its sums | rows of step 2, pass 2, its sums | ..
// python/tessera/hosts/rotation.py does the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/workspace.hpp"
#include "expert_parallel/hosts/rail.hpp"
#include "expert_parallel/hosts/stream_calls.hpp"

namespace tessera::expert_parallel::hosts {

struct RotationShape {
  std::int32_t hosts = 1;
  std::int64_t max_tokens = 0, hidden = 0;
  std::int32_t top_k = 0, experts = 0;  // experts: of each host
  bool counted = false;
};

/// Tensors of an inner pass: tokens of one host for the experts of this one, which numbers them. Shapes as in
/// HostsForwardArgs.
struct InnerForward {
  std::int32_t step = 0;
  std::int64_t tokens = 0;
  void const* gmem_x = nullptr;
  std::int32_t const* gmem_topk_ids = nullptr;
  float const* gmem_topk_weights = nullptr;
  void* gmem_o = nullptr;
};
struct InnerBackward {
  std::int32_t step = 0;
  std::int64_t tokens = 0;
  void const* gmem_d_o = nullptr;
  void const* gmem_x = nullptr;
  std::int32_t const* gmem_topk_ids = nullptr;
  void* gmem_dx = nullptr;
  float* gmem_dscores = nullptr;
};

/// A pass of the ranks of this host.
class InnerPass {
 public:
  virtual Status forward(InnerForward const& args, Stream stream) noexcept = 0;
  virtual Status backward(InnerBackward const& args, Stream stream) noexcept = 0;

 protected:
  ~InnerPass() = default;
};

/// Rows that go to each host and come from each.
struct HostRows {
  std::int64_t* out = nullptr;  // [H]
  std::int64_t* in = nullptr;
};

/// Places what backward reads of a forward pass: the tokens that go to each host, the ids of this host's experts, and,
/// behind these, the messages that came, without which it is what a pass needs for itself.
struct SavedRegions {
  core::WorkspacePlan plan;
  core::Region<std::int32_t> token, place, ids;
  core::Region<std::byte> messages;
  std::size_t message_bytes = 0;

  SavedRegions(RotationShape const& shape, bool messages) noexcept;
  [[nodiscard]] std::byte* message(std::byte* base, std::int32_t step) const noexcept {
    return messages.in(base) + static_cast<std::size_t>(step - 1) * message_bytes;
  }
};

struct RotationRegions {
  core::WorkspacePlan plan;
  core::Region<std::byte> out, into;  // messages
  core::Region<std::byte> back;       // results for the tokens of another host
  core::Region<std::byte> partials;   // those that came, by host
  core::Region<std::int64_t> counts;  // [2,H]: rows that go, and that come
  core::Region<std::int64_t> fields;  // [1+H,kMaxFields]
  std::size_t partial_bytes = 0;

  explicit RotationRegions(RotationShape const& shape) noexcept;
};

/// A number that is equal on all hosts.
struct Field {
  char const* name = nullptr;
  std::int64_t value = 0;
};
inline constexpr std::size_t kMaxFields = 16;

class Rotation {
 public:
  /// workspace: RotationRegions::plan.bytes(), on the rail's GPU.
  Rotation(RotationShape const& shape, Rail& rail, void* workspace,
           StreamCalls const& calls = stream_calls()) noexcept;

  /// Tells the counterparts at most kMaxFields fields, the same ones on all. Waits for theirs; invalid_argument where
  /// one differs, on all hosts. Collective along the rail.
  Status agree(std::span<Field const> fields, Stream stream) noexcept;

  struct Forward {
    std::int64_t tokens = 0;
    void const* gmem_x = nullptr;
    std::int32_t const* gmem_topk_ids = nullptr;
    float const* gmem_topk_weights = nullptr;
    void* gmem_o = nullptr;
    void* gmem_saved = nullptr;  // of SavedRegions
    bool saves = false;          // those with messages
  };
  Status forward(Forward const& args, HostRows rows, InnerPass& inner, Stream stream) noexcept;

  struct Backward {
    std::int64_t tokens = 0;
    void const* gmem_d_o = nullptr;
    void const* gmem_x = nullptr;
    void* gmem_dx = nullptr;
    float* gmem_dscores = nullptr;
    void* gmem_saved = nullptr;
  };
  Status backward(Backward const& args, HostRows rows, InnerPass& inner, Stream stream) noexcept;

 private:
  // The host that this rank's rows go to in a step, and the one that rows come from.
  [[nodiscard]] std::int32_t to(std::int32_t step) const noexcept;
  [[nodiscard]] std::int32_t of(std::int32_t step) const noexcept;
  [[nodiscard]] std::byte* partial(std::int32_t host) const noexcept;
  Status count(Forward const& args, HostRows rows, SavedRegions const& saved,
               Stream stream) noexcept;
  [[nodiscard]] PackRows pack(std::int64_t tokens, HostRows rows, std::int32_t host,
                              std::byte* saved) const noexcept;
  Status sum(std::int64_t tokens, std::byte* saved, HostRows rows, std::size_t row_bytes,
             std::int64_t columns, bool fp32, void* gmem_sum, Stream stream) noexcept;

  RotationShape shape_;
  Rail& rail_;
  StreamCalls calls_;
  RotationRegions regions_;
  SavedRegions saved_;
  std::byte* base_;
};

}  // namespace tessera::expert_parallel::hosts
