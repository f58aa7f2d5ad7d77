// SPDX-License-Identifier: Apache-2.0
// What the fast forward GEMMs ask of a call, and which instance serves it.
#include <cstdarg>
#include <cstdint>
#include <cstdio>

#include "projection.hpp"

namespace tessera::cuda {
namespace {

constexpr int64_t kMostSegments = 640;           // block::kMaxSegments: offsets in shared memory
constexpr int64_t kMostRows = int64_t{1} << 30;  // ragged tensor maps

__attribute__((format(printf, 1, 2))) Refusal refusal(char const* format, ...) {
  Refusal r;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(r.text, sizeof r.text, format, arguments);
  va_end(arguments);
  return r;
}

bool aligned(void const* gmem) { return reinterpret_cast<uintptr_t>(gmem) % 16 == 0; }

// What TMA and the 16-byte copies need of sizes, pitches and bases; the first failure wins.
class Requirements {
 public:
  void multiple_of_8(char const* name, int64_t value) {
    if (ok() && value % 8 != 0) {
      r_ = refusal("%s=%lld: rows of 16 bytes need a multiple of 8", name,
                   static_cast<long long>(value));
    }
  }
  void at_most(char const* name, int64_t value, int64_t limit) {
    if (ok() && value > limit) {
      r_ = refusal("%s=%lld: at most %lld", name, static_cast<long long>(value),
                   static_cast<long long>(limit));
    }
  }
  void base(char const* name, void const* gmem) {
    if (ok() && !aligned(gmem)) r_ = refusal("%s: not aligned to 16 bytes", name);
  }
  void weight(char const* name, WeightRows const& w, int64_t rows) {
    base(name, w.gmem);
    if (!ok()) return;
    if (w.expert_stride % 8 != 0 || w.row_stride % 8 * (w.column_stride == 1) != 0 ||
        w.block_stride % 8 * (w.block < rows) != 0 ||
        (w.column_stride != 1 && w.column_stride % 8 != 0)) {
      r_ = refusal("%s: a stride that is no multiple of 16 bytes", name);
    } else if (w.column_stride != 1 && (w.row_stride != 1 || w.block < rows)) {
      r_ = refusal("%s: transposed rows that are not contiguous (interleaved or blocked)", name);
    } else if (w.block < rows && !(w.block % 64 == 0 || (w.block > 0 && 64 % w.block == 0))) {
      r_ = refusal("%s: blocks of %lld rows; 64 and its multiples and divisors are served", name,
                   static_cast<long long>(w.block));
    }
  }
  void bias(char const* name, WeightRows const& b, int64_t rows) {
    if (ok() && b.gmem != nullptr && b.block < rows) r_ = refusal("%s: in blocks", name);
  }
  [[nodiscard]] bool ok() const { return !r_.refused(); }
  [[nodiscard]] Refusal result() const { return r_; }

 private:
  Refusal r_;
};

}  // namespace

Refusal refuse_router_logits(RouterLogitsArguments const& args) {
  Requirements need;
  need.multiple_of_8("d", args.hidden);
  need.multiple_of_8("pitch of x", args.x.pitch);
  need.multiple_of_8("pitch of w_router", args.w_router.pitch);
  need.at_most("tokens", args.x.rows, kMostRows);
  need.base("x", args.x.gmem);
  need.base("w_router", args.w_router.gmem);
  return need.result();
}

Refusal refuse_up_projection_fwd(UpProjectionFwdArguments const& args) {
  Requirements need;
  need.multiple_of_8("d", args.hidden);
  need.multiple_of_8("n", args.intermediate);
  need.multiple_of_8("pitch of x", args.x.pitch);
  need.at_most("experts", args.experts, kMostSegments);
  need.at_most("rows", args.rows, kMostRows);
  // Gathered rows are addressed by 32-bit numbers of 16 bytes.
  need.at_most("tokens * d / 8", args.x.rows * (args.x.pitch / 8), int64_t{0xffffffff});
  need.base("x", args.x.gmem);
  need.base("h", args.gmem_h);
  need.base("a", args.gmem_a);
  int const halves = args.activation.gated() ? 2 : 1;
  for (int half = 0; half < halves; ++half) {
    need.weight("w_up", args.w_up[half], args.intermediate);
    need.bias("b_up", args.b_up[half], args.intermediate);
  }
  return need.result();
}

Refusal refuse_down_projection_fwd(DownProjectionFwdArguments const& args) {
  Requirements need;
  need.multiple_of_8("d", args.hidden);
  need.multiple_of_8("n", args.intermediate);
  need.at_most("experts", args.experts, kMostSegments);
  need.at_most("rows", args.rows, kMostRows);
  need.base("a", args.gmem_a);
  need.base("y", args.gmem_y);
  need.weight("w_down", args.w_down, args.hidden);
  return need.result();
}

}  // namespace tessera::cuda
