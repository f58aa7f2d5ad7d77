// SPDX-License-Identifier: Apache-2.0
#include "expert_parallel/hosts/rotation.hpp"

#include <array>

namespace tessera::expert_parallel::hosts {
namespace {

// Bytes of a row of a message: rows of x or d_o, or dx, K scores, K ids.
std::size_t x_bytes(RotationShape const& s) noexcept {
  return 2 * static_cast<std::size_t>(s.hidden);
}
std::size_t choice_bytes(RotationShape const& s) noexcept {
  return 4 * static_cast<std::size_t>(s.top_k);
}

// A message of `rows` rows: matrices behind each other.
struct Matrices {
  std::byte* x;
  float* weights;
  std::int32_t* ids;
  Matrices(RotationShape const& s, std::byte* begin, std::int64_t rows) noexcept
      : x(begin),
        weights(reinterpret_cast<float*>(begin + static_cast<std::size_t>(rows) * x_bytes(s))),
        ids(reinterpret_cast<std::int32_t*>(weights + rows * s.top_k)) {}
};

}  // namespace

SavedRegions::SavedRegions(RotationShape const& s, bool has_messages) noexcept
    : token(plan.add<std::int32_t>(s.counted ? s.hosts * s.max_tokens : 0)),
      place(plan.add<std::int32_t>(s.counted ? s.hosts * s.max_tokens : 0)),
      ids(plan.add<std::int32_t>(s.max_tokens * s.top_k)) {
  constexpr std::size_t kLine = core::WorkspacePlan::kAlignment;
  std::size_t const bytes =
      static_cast<std::size_t>(s.max_tokens) * (x_bytes(s) + 2 * choice_bytes(s));
  message_bytes = (bytes + kLine - 1) / kLine * kLine;
  messages = plan.add<std::byte>(
      has_messages ? static_cast<std::int64_t>(message_bytes) * (s.hosts - 1) : 0);
}

RotationRegions::RotationRegions(RotationShape const& s) noexcept {
  auto const message = static_cast<std::int64_t>(s.max_tokens) *
                       static_cast<std::int64_t>(x_bytes(s) + 2 * choice_bytes(s));
  std::int64_t const others = s.hosts > 1 ? 1 : 0;
  out = plan.add<std::byte>(others * message);
  into = plan.add<std::byte>(others * message);
  back = plan.add<std::byte>(others * message);
  constexpr std::size_t kLine = core::WorkspacePlan::kAlignment;
  partial_bytes =
      (static_cast<std::size_t>(s.max_tokens) * (x_bytes(s) + choice_bytes(s)) + kLine - 1) /
      kLine * kLine;
  partials = plan.add<std::byte>(static_cast<std::int64_t>(partial_bytes) * s.hosts);
  counts = plan.add<std::int64_t>(2 * s.hosts);
  fields = plan.add<std::int64_t>((1 + s.hosts) * std::int64_t{kMaxFields});
}

Rotation::Rotation(RotationShape const& shape, Rail& rail, void* workspace,
                   StreamCalls const& calls) noexcept
    : shape_(shape),
      rail_(rail),
      calls_(calls),
      regions_(shape),
      saved_(shape, true),
      base_(core::WorkspacePlan::align(workspace)) {}

std::int32_t Rotation::to(std::int32_t step) const noexcept {
  return (rail_.place().host - step + shape_.hosts) % shape_.hosts;
}
std::int32_t Rotation::of(std::int32_t step) const noexcept {
  return (rail_.place().host + step) % shape_.hosts;
}
std::byte* Rotation::partial(std::int32_t host) const noexcept {
  return regions_.partials.in(base_) + static_cast<std::size_t>(host) * regions_.partial_bytes;
}

Status Rotation::agree(std::span<Field const> fields, Stream stream) noexcept {
  TESSERA_TRY(rail_.fault());
  if (shape_.hosts == 1) return {};
  std::array<std::int64_t, (1 + kMaxHosts) * kMaxFields> numbers = {};
  for (std::size_t i = 0; i < fields.size(); ++i) numbers[i] = fields[i].value;
  constexpr std::size_t kBytes = kMaxFields * sizeof numbers[0];
  std::int64_t* const mine = regions_.fields.in(base_);
  TESSERA_TRY(calls_.write(mine, numbers.data(), kBytes, stream));
  std::array<Message, kMaxHosts> messages;
  std::size_t others = 0;
  for (std::int32_t step = 1; step < shape_.hosts; ++step) {
    std::int32_t const host = of(step);
    messages[others++] = {.out = mine,
                          .out_bytes = kBytes,
                          .to = host,
                          .into = mine + (1 + host) * std::int64_t{kMaxFields},
                          .into_bytes = kBytes,
                          .of = host};
  }
  TESSERA_TRY(rail_.exchange("descriptions", {messages.data(), others}, stream));
  auto const hosts = static_cast<std::size_t>(shape_.hosts);
  TESSERA_TRY(rail_.read(numbers.data(), mine, (1 + hosts) * kBytes, stream));
  for (std::size_t h = 0; h < hosts; ++h) {
    if (static_cast<std::int32_t>(h) == rail_.place().host) continue;
    for (std::size_t i = 0; i < fields.size(); ++i) {
      std::int64_t const theirs = numbers[(1 + h) * kMaxFields + i];
      if (theirs == fields[i].value) continue;
      return Status::invalid("%s=%lld on host %d, %lld on host %zu: equal on all hosts",
                             fields[i].name, static_cast<long long>(fields[i].value),
                             rail_.place().host, static_cast<long long>(theirs), h);
    }
  }
  return {};
}

// Finds out which rows cross.
Status Rotation::count(Forward const& args, HostRows rows, SavedRegions const& saved,
                       Stream stream) noexcept {
  for (std::int32_t h = 0; h < shape_.hosts; ++h) rows.out[h] = rows.in[h] = shape_.max_tokens;
  if (!shape_.counted || shape_.hosts == 1) return {};
  auto const captures = calls_.captures(stream);
  if (!captures.ok()) return captures.status();
  if (captures.value()) {
    return Status::invalid(
        "exchange=counted: the host reads numbers of rows, which cannot be captured into a graph; "
        "make the objects with HostExchange::all_rows");
  }
  std::byte* const memory = core::WorkspacePlan::align(args.gmem_saved);
  std::int64_t* const counts = regions_.counts.in(base_);
  TESSERA_TRY(calls_.choose({.gmem_topk_ids = args.gmem_topk_ids,
                             .tokens = args.tokens,
                             .top_k = shape_.top_k,
                             .hosts = shape_.hosts,
                             .experts = shape_.experts,
                             .gmem_token = saved.token.in(memory),
                             .gmem_place = saved.place.in(memory),
                             .gmem_counts = counts},
                            stream));
  std::array<Message, kMaxHosts> messages;
  std::size_t others = 0;
  for (std::int32_t step = 1; step < shape_.hosts; ++step) {
    std::int32_t const host = of(step);
    messages[others++] = {.out = counts + host,
                          .out_bytes = sizeof *counts,
                          .to = host,
                          .into = counts + shape_.hosts + host,
                          .into_bytes = sizeof *counts,
                          .of = host};
  }
  TESSERA_TRY(rail_.exchange("numbers of rows", {messages.data(), others}, stream));
  std::array<std::int64_t, 2 * kMaxHosts> numbers = {};
  auto const hosts = static_cast<std::size_t>(shape_.hosts);
  TESSERA_TRY(rail_.read(numbers.data(), counts, 2 * hosts * sizeof *counts, stream));
  for (std::size_t h = 0; h < hosts; ++h) {
    if (static_cast<std::int32_t>(h) == rail_.place().host) continue;
    rows.out[h] = numbers[h];
    rows.in[h] = numbers[hosts + h];
    if (rows.in[h] < 0 || rows.in[h] > shape_.max_tokens) {
      return Status::invalid(
          "host %zu sends %lld rows: at most max_tokens=%lld; make all objects of equal descs", h,
          static_cast<long long>(rows.in[h]), static_cast<long long>(shape_.max_tokens));
    }
  }
  return {};
}

// Returns a message to the host, whose tensors are for the caller to fill in.
PackRows Rotation::pack(std::int64_t tokens, HostRows rows, std::int32_t host,
                        std::byte* saved) const noexcept {
  bool const listed = shape_.counted && host != rail_.place().host;
  return {.rows = rows.out[host],
          .tokens = tokens,
          .gmem_token = listed ? saved_.token.in(saved) + host * tokens : nullptr,
          .words = shape_.hidden / 8,
          .top_k = shape_.top_k,
          .first_expert = host * shape_.experts,
          .experts = shape_.experts};
}

// Adds up results by host; row_bytes: what stands ahead of these columns for each row of a host's results.
Status Rotation::sum(std::int64_t tokens, std::byte* saved, HostRows rows, std::size_t row_bytes,
                     std::int64_t columns, bool fp32, void* gmem_sum, Stream stream) noexcept {
  std::int32_t const own = rail_.place().host;
  SumPartials args = {.tokens = tokens,
                      .columns = columns,
                      .hosts = shape_.hosts,
                      .host = own,
                      .gmem_place = shape_.counted ? saved_.place.in(saved) : nullptr,
                      .gmem_sum = gmem_sum,
                      .fp32 = fp32};
  for (std::int32_t h = 0; h < shape_.hosts; ++h) {
    std::int64_t const count = h == own ? tokens : rows.out[h];
    args.gmem_partial[h] = partial(h) + static_cast<std::size_t>(count) * row_bytes;
  }
  return calls_.sum(args, stream);
}

Status Rotation::forward(Forward const& args, HostRows rows, InnerPass& inner,
                         Stream stream) noexcept {
  TESSERA_TRY(rail_.begin("forward"));
  std::byte* const saved = core::WorkspacePlan::align(args.gmem_saved);
  TESSERA_TRY(count(args, rows, saved_, stream));
  std::int32_t const own = rail_.place().host;
  PackRows ids = pack(args.tokens, rows, own, saved);
  ids.rows = args.tokens;
  ids.gmem_topk_ids = args.gmem_topk_ids;
  ids.gmem_row_ids = saved_.ids.in(saved);
  TESSERA_TRY(calls_.pack(ids, stream));
  TESSERA_TRY(inner.forward({.step = 0,
                             .tokens = args.tokens,
                             .gmem_x = args.gmem_x,
                             .gmem_topk_ids = ids.gmem_row_ids,
                             .gmem_topk_weights = args.gmem_topk_weights,
                             .gmem_o = partial(own)},
                            stream));
  for (std::int32_t step = 1; step < shape_.hosts; ++step) {
    std::int32_t const to = this->to(step), of = this->of(step);
    std::int64_t const out_rows = rows.out[to], in_rows = rows.in[of];
    std::byte* const out = regions_.out.in(base_);
    std::byte* const into = args.saves ? saved_.message(saved, step) : regions_.into.in(base_);
    std::byte* const back = regions_.back.in(base_);
    Matrices const sent(shape_, out, out_rows), came(shape_, into, in_rows);
    PackRows message = pack(args.tokens, rows, to, saved);
    message.gmem_x = args.gmem_x;
    message.gmem_topk_weights = args.gmem_topk_weights;
    message.gmem_topk_ids = args.gmem_topk_ids;
    message.gmem_rows = sent.x;
    message.gmem_row_weights = sent.weights;
    message.gmem_row_ids = sent.ids;
    TESSERA_TRY(calls_.pack(message, stream));
    std::size_t const row = x_bytes(shape_) + 2 * choice_bytes(shape_);
    Message const there = {.out = out,
                           .out_bytes = static_cast<std::size_t>(out_rows) * row,
                           .to = to,
                           .into = into,
                           .into_bytes = static_cast<std::size_t>(in_rows) * row,
                           .of = of};
    TESSERA_TRY(rail_.exchange("rows to their experts", {&there, 1}, stream));
    TESSERA_TRY(inner.forward({.step = step,
                               .tokens = in_rows,
                               .gmem_x = came.x,
                               .gmem_topk_ids = came.ids,
                               .gmem_topk_weights = came.weights,
                               .gmem_o = back},
                              stream));
    Message const again = {.out = back,
                           .out_bytes = static_cast<std::size_t>(in_rows) * x_bytes(shape_),
                           .to = of,
                           .into = partial(to),
                           .into_bytes = static_cast<std::size_t>(out_rows) * x_bytes(shape_),
                           .of = to};
    TESSERA_TRY(rail_.exchange("partial sums to their tokens", {&again, 1}, stream));
  }
  return sum(args.tokens, saved, rows, 0, shape_.hidden, false, args.gmem_o, stream);
}

Status Rotation::backward(Backward const& args, HostRows rows, InnerPass& inner,
                          Stream stream) noexcept {
  TESSERA_TRY(rail_.begin("backward"));
  std::byte* const saved = core::WorkspacePlan::align(args.gmem_saved);
  std::int32_t const own = rail_.place().host;
  TESSERA_TRY(inner.backward({.step = 0,
                              .tokens = args.tokens,
                              .gmem_d_o = args.gmem_d_o,
                              .gmem_x = args.gmem_x,
                              .gmem_topk_ids = saved_.ids.in(saved),
                              .gmem_dx = partial(own),
                              .gmem_dscores = Matrices(shape_, partial(own), args.tokens).weights},
                             stream));
  for (std::int32_t step = 1; step < shape_.hosts; ++step) {
    std::int32_t const to = this->to(step), of = this->of(step);
    std::int64_t const out_rows = rows.out[to], in_rows = rows.in[of];
    std::byte* const out = regions_.out.in(base_);
    std::byte* const into = regions_.into.in(base_);
    Matrices const came(shape_, saved_.message(saved, step), in_rows);
    Matrices const back(shape_, regions_.back.in(base_), in_rows);
    PackRows message = pack(args.tokens, rows, to, saved);
    message.gmem_x = args.gmem_d_o;
    message.gmem_rows = out;
    TESSERA_TRY(calls_.pack(message, stream));
    Message const there = {.out = out,
                           .out_bytes = static_cast<std::size_t>(out_rows) * x_bytes(shape_),
                           .to = to,
                           .into = into,
                           .into_bytes = static_cast<std::size_t>(in_rows) * x_bytes(shape_),
                           .of = of};
    TESSERA_TRY(rail_.exchange("gradients of o to the experts", {&there, 1}, stream));
    TESSERA_TRY(inner.backward({.step = step,
                                .tokens = in_rows,
                                .gmem_d_o = into,
                                .gmem_x = came.x,
                                .gmem_topk_ids = came.ids,
                                .gmem_dx = back.x,
                                .gmem_dscores = back.weights},
                               stream));
    std::size_t const row = x_bytes(shape_) + choice_bytes(shape_);
    Message const again = {.out = back.x,
                           .out_bytes = static_cast<std::size_t>(in_rows) * row,
                           .to = of,
                           .into = partial(to),
                           .into_bytes = static_cast<std::size_t>(out_rows) * row,
                           .of = to};
    TESSERA_TRY(rail_.exchange("gradients to their tokens", {&again, 1}, stream));
  }
  TESSERA_TRY(sum(args.tokens, saved, rows, 0, shape_.hidden, false, args.gmem_dx, stream));
  return sum(args.tokens, saved, rows, x_bytes(shape_), shape_.top_k, true, args.gmem_dscores,
             stream);
}

}  // namespace tessera::expert_parallel::hosts
