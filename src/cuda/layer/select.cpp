// SPDX-License-Identifier: Apache-2.0
#include "cuda/layer/select.hpp"

#include <cstdio>

#include "cuda/host/kernel_limits.hpp"
#include "tessera/names.hpp"

namespace tessera::cuda {
namespace {

using Int = long long;  // for %lld

constexpr std::int64_t kMaxExperts = 1024, kMaxTopK = 32, kVector = 8;
constexpr std::uintptr_t kAlignment = 16;

template <class... Values>
Refusal refusal(char const* format, Values... values) noexcept {
  Refusal out;
  std::snprintf(out.text, sizeof(out.text), format, values...);
  return out;
}

bool aligned(void const* gmem) noexcept {
  return reinterpret_cast<std::uintptr_t>(gmem) % kAlignment == 0;
}

/// Rows are contiguous along the reduction, and those that a warp copies together lie equally far apart.
bool has_bulk_rows(WeightRows const& w) noexcept {
  return w.column_stride == 1 && w.block % kFewTokensWeightRows == 0;
}

constexpr std::int64_t kMaxRows = std::int64_t{1} << 30;  // of ragged tensor maps
// A tile's number has 16 bits, one of them its sign.
constexpr std::int64_t kMaxColumns = std::int64_t{1} << 22;

// Checks what TMA and the 16-byte copies need of sizes, pitches and bases; the first failure wins.
class Requirements {
 public:
  void multiple_of_8(char const* name, std::int64_t value) {
    if (ok() && value % 8 != 0) {
      r_ = refusal("%s=%lld: rows of 16 bytes need a multiple of 8", name, static_cast<Int>(value));
    }
  }
  void at_most(char const* name, std::int64_t value, std::int64_t limit) {
    if (ok() && value > limit) {
      r_ = refusal("%s=%lld: at most %lld", name, static_cast<Int>(value), static_cast<Int>(limit));
    }
  }
  void base(char const* name, void const* gmem) {
    if (ok() && !aligned(gmem)) r_ = refusal("%s: not aligned to 16 bytes", name);
  }
  void weight(char const* name, WeightRows const& w, std::int64_t rows) {
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
                   static_cast<Int>(w.block));
    }
  }
  void bias(char const* name, WeightRows const& b, std::int64_t rows) {
    if (b.gmem != nullptr) one_block(name, b, rows);
  }
  void one_block(char const* name, WeightRows const& w, std::int64_t rows) {
    if (ok() && w.block < rows) r_ = refusal("%s: in blocks", name);
  }
  // Elements of each expert, contiguous.
  void vector(char const* name, WeightRows const& b) {
    base(name, b.gmem);
    multiple_of_8("pitch of a bias", b.expert_stride);
    if (ok() && b.row_stride != 1) r_ = refusal("%s: not contiguous", name);
  }
  void transposed(char const* name, WeightRows const& w) {
    if (ok() && w.column_stride == 1) r_ = refusal("%s: not transposed as w_up is", name);
  }
  // Sizes of a GEMM over the rows of experts.
  void experts(std::int64_t hidden, std::int64_t intermediate, std::int64_t experts,
               std::int64_t rows) {
    multiple_of_8("d", hidden);
    multiple_of_8("n", intermediate);
    at_most("d", hidden, kMaxColumns);
    at_most("n", intermediate, kMaxColumns);
    at_most("experts", experts, kMaxGemmSegments);
    at_most("rows", rows, kMaxRows);
  }
  // A gradient needs rows: without them nothing can be gathered, not even to be zero-filled.
  void some_rows(std::int64_t rows) {
    if (ok() && rows == 0) r_ = refusal("%s", "rows=0: zeros at most");
  }
  // Gathered rows are addressed by 32-bit numbers of 16 bytes.
  void gathered(char const* name, MatrixRows const& source) {
    multiple_of_8("pitch of gathered rows", source.pitch);
    at_most("tokens * d / 8", source.rows * (source.pitch / 8), std::int64_t{0xffffffff});
    base(name, source.gmem);
  }
  void router_gradient(DscoresArguments const& dscores, RouterDlogitsArguments const& dlogits) {
    at_most("experts", dlogits.experts, kMaxExperts);
    at_most("top_k", dlogits.top_k, kMaxTopK);
    if (!dlogits.dlogits_are_scratch) base("dlogits", dlogits.gmem_dlogits);
    if (dscores.b_down.gmem == nullptr) return;
    multiple_of_8("d", dscores.hidden);
    multiple_of_8("pitch of d_o", dscores.d_o.pitch);
    base("d_o", dscores.d_o.gmem);
    vector("b_down", dscores.b_down);
  }
  [[nodiscard]] bool ok() const { return !r_.refused(); }
  [[nodiscard]] Refusal result() const { return r_; }

 private:
  Refusal r_;
};

Refusal refuse_wgrad(WgradArguments const& args, char const* left, char const* right) noexcept {
  Requirements need;
  need.experts(args.hidden, args.intermediate, args.experts, args.rows);
  need.some_rows(args.rows);
  need.gathered(left, args.left);
  need.base(right, args.gmem_right);
  for (int half = 0; half < args.halves; ++half) {
    if (args.dw[half].gmem != nullptr) need.weight("dw", args.dw[half], args.intermediate);
  }
  return need.result();
}

constexpr char kNoSm100[] = "sm_100a: no kernel of this op yet";

Refusal refuse_interleaved_sm100(bool interleaved) noexcept {
  if (!interleaved) return {};
  return refusal("%s", "interleaved columns: kernels of sm_100a take halves");
}

}  // namespace

Refusal refuse(RouterLogitsArguments const& args) noexcept {
  Requirements need;
  need.multiple_of_8("d", args.hidden);
  need.multiple_of_8("pitch of x", args.x.pitch);
  if (!args.is_fp32) need.multiple_of_8("pitch of w_router", args.w_router.pitch);
  need.at_most("tokens", args.x.rows, kMaxRows);
  need.at_most("experts", args.experts, kMaxColumns);
  need.base("x", args.x.gmem);
  if (!args.is_fp32) need.base("w_router", args.w_router.gmem);  // its terms lie in the workspace
  return need.result();
}

Refusal refuse(UpProjectionFwdArguments const& args) noexcept {
  Requirements need;
  need.experts(args.hidden, args.intermediate, args.experts, args.rows);
  need.gathered("x", args.x);
  need.base("h", args.gmem_h);
  need.base("a", args.gmem_a);
  int const halves = args.activation.gated() ? 2 : 1;
  for (int half = 0; half < halves; ++half) {
    need.bias("b_up", args.b_up[half], args.intermediate);
    if (!args.interleaved) need.weight("w_up", args.w_up[half], args.intermediate);
  }
  if (args.interleaved) need.weight("w_up", joined(args.w_up), 2 * args.intermediate);
  return need.result();
}

Refusal refuse(DownProjectionFwdArguments const& args) noexcept {
  Requirements need;
  need.experts(args.hidden, args.intermediate, args.experts, args.rows);
  need.base("a", args.gmem_a);
  need.base("y", args.gmem_y);
  need.weight("w_down", args.w_down, args.hidden);
  return need.result();
}

Refusal refuse(DownProjectionDgradArguments const& args) noexcept {
  Requirements need;
  need.experts(args.hidden, args.intermediate, args.experts, args.rows);
  need.gathered("d_o", args.d_o);
  need.base("h", args.gmem_h);
  need.base("dh", args.gmem_dh);
  need.base("a_scaled", args.gmem_a_scaled);
  need.weight("w_down", args.w_down, args.hidden);
  if (args.interleaved) need.transposed("w_down", args.w_down);
  return need.result();
}

Refusal refuse(UpProjectionDgradArguments const& args) noexcept {
  Requirements need;
  need.experts(args.hidden, args.intermediate, args.experts, args.rows);
  need.base("dh", args.gmem_dh);
  need.base("dx rows", args.gmem_dx_rows);
  for (int half = 0; half < (args.gated ? 2 : 1); ++half) {
    need.weight("w_up", args.w_up[half], args.intermediate);
    need.one_block("w_up", args.w_up[half], args.intermediate);
  }
  if (args.gmem_row_dlogits != nullptr) {
    need.multiple_of_8("pitch of w_router", args.w_router.pitch);
    need.base("w_router", args.w_router.gmem);
  }
  return need.result();
}

Refusal refuse(DownProjectionWgradArguments const& args) noexcept {
  return refuse_wgrad(args, "d_o", "a_scaled");
}
Refusal refuse(UpProjectionWgradArguments const& args) noexcept {
  return refuse_wgrad(args, "x", "dh");
}
Refusal refuse(RouterGradientArguments const& args) noexcept {
  Requirements need;
  need.router_gradient(args.dscores, args.dlogits);
  if (need.ok() && args.dlogits.gmem_token_offsets != nullptr) {
    return refusal("%s", "experts per token vary");
  }
  return need.result();
}
Refusal refuse(RoundedGradientArguments const& args) noexcept {
  Requirements need;
  need.router_gradient(args.dscores, args.rounded.dlogits);
  need.at_most("tokens", args.rounded.dlogits.tokens, kMaxRows);
  need.at_most("slots", args.dscores.slots, kMaxRows);
  return need.result();
}
Refusal refuse(RouterDgradArguments const& args) noexcept {
  Requirements need;
  need.multiple_of_8("d", args.hidden);
  need.multiple_of_8("experts", args.experts);
  need.multiple_of_8("pitch of w_router", args.w_router.pitch);
  need.multiple_of_8("pitch of dx", args.dx_pitch);
  need.at_most("tokens", args.tokens, kMaxRows);
  need.at_most("d", args.hidden, kMaxColumns);
  need.base("w_router", args.w_router.gmem);
  need.base("dx", args.gmem_dx);
  if (args.gmem_tokens != nullptr) {
    std::int64_t const products = std::int64_t{args.experts} * args.terms;
    need.gathered("dlogits", {args.gmem_dlogits, args.tokens, products});
  }
  return need.result();
}
Refusal refuse(RouterWgradArguments const& args) noexcept {
  Requirements need;
  need.multiple_of_8("d", args.hidden);
  need.multiple_of_8("experts", args.experts);
  need.at_most("tokens", args.x.rows, kMaxRows);
  need.at_most("d", args.hidden, kMaxColumns);
  need.at_most("experts", args.experts, kMaxColumns);
  need.some_rows(args.x.rows);
  need.gathered("x", args.x);
  return need.result();
}

Refusal refuse(BiasGradientArguments const& args) noexcept {
  if (args.left_is_fp32) return refusal("%s", "rows of fp32");
  if (args.gmem_expert_offsets == nullptr) return refusal("%s", "all rows are one expert's");
  Requirements need;
  need.multiple_of_8("columns", args.columns);
  need.multiple_of_8("pitch of rows", args.left.pitch);
  need.base("rows", args.left.gmem);
  return need.result();
}

Refusal refuse(RouterLossArguments const& args) noexcept {
  Requirements need;
  need.at_most("experts", args.experts, kMaxExperts);
  return need.result();
}

Refusal refuse(RouteArguments const& args) noexcept {
  if (args.experts > kMaxExperts) {
    return refusal("experts=%d: at most %lld", args.experts, static_cast<Int>(kMaxExperts));
  }
  if (args.top_k > kMaxTopK) {
    return refusal("top_k=%d: at most %lld", args.top_k, static_cast<Int>(kMaxTopK));
  }
  return {};
}

Refusal refuse(MetadataArguments const& args) noexcept {
  if (args.experts > kMaxExperts) {
    return refusal("experts=%d: at most %lld", args.experts, static_cast<Int>(kMaxExperts));
  }
  return {};
}

Refusal refuse(AggregateArguments const& args) noexcept {
  if (args.hidden % kVector != 0 || args.o_pitch % kVector != 0) {
    return refusal("hidden=%lld, rows of o %lld apart: multiples of %lld are needed",
                   static_cast<Int>(args.hidden), static_cast<Int>(args.o_pitch),
                   static_cast<Int>(kVector));
  }
  if (!aligned(args.gmem_y) || !aligned(args.gmem_o)) {
    return refusal("%s", "o: its address is no multiple of 16 bytes");
  }
  return {};
}

Refusal refuse_sm100(RouterLogitsArguments const&) noexcept { return refusal("%s", kNoSm100); }
Refusal refuse_sm100(RouterDgradArguments const&) noexcept { return refusal("%s", kNoSm100); }
Refusal refuse_sm100(RouterWgradArguments const&) noexcept { return refusal("%s", kNoSm100); }
Refusal refuse_sm100(UpProjectionFwdArguments const& args) noexcept {
  return refuse_interleaved_sm100(args.interleaved);
}
Refusal refuse_sm100(DownProjectionDgradArguments const& args) noexcept {
  return refuse_interleaved_sm100(args.interleaved);
}

bool prefers_few_tokens(RouterLogitsArguments const& args) noexcept {
  constexpr std::int64_t kFp32Vector = 4;
  bool const vectors =
      !args.is_fp32 || (args.w_router.pitch % kFp32Vector == 0 && aligned(args.w_router.gmem));
  return args.x.rows <= kGemvTokens && vectors && !refuse(args).refused();
}
bool prefers_few_tokens(ExpertsFwdArguments const& args) noexcept {
  UpProjectionFwdArguments const& up = args.up;
  DownProjectionFwdArguments const& down = args.down;
  return has_bulk_rows(up.w_up[0]) && (!up.activation.gated() || has_bulk_rows(up.w_up[1])) &&
         has_bulk_rows(down.w_down) && !refuse(up).refused() && !refuse(down).refused() &&
         (!args.has_aggregate || !refuse(args.aggregate).refused());
}

}  // namespace tessera::cuda
