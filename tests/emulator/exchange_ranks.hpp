// SPDX-License-Identifier: Apache-2.0
// Passes of route, dispatch and combine of several emulated ranks. Every rank has a stream, in which steps of the host
// stand between the kernels: they place rows, and look at what a kernel has left as soon as it has ended. So ranks are
// as far apart as their kernels let them be.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime.h>
#include "core/bf16.hpp"
#include "expert_parallel/exchange/exchange.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/exchange_pass.hpp"

namespace tessera::expert_parallel {

// Those of one GPU, but that copies are later still.
inline emulator::Schedule schedule_of(std::uint64_t i) {
  emulator::Schedule schedule = emulator::kSchedules[i % std::size(emulator::kSchedules)];
  if (schedule.copies == 256) schedule.copies = 512;
  return schedule;
}

}  // namespace tessera::expert_parallel

namespace tessera::expert_parallel::unfused {

// "": equal.
template <class T>
std::string compare(char const* what, T const* got, Memory<T> const& wanted) {
  if (std::memcmp(got, wanted.get(), wanted.size() * sizeof(T)) == 0) return "";
  std::size_t i = 0;
  while (std::memcmp(got + i, wanted.get() + i, sizeof(T)) == 0) ++i;
  return std::string(what) + " differ at " + std::to_string(i);
}

// All ranks of an exchange, whose first pass is `first_epoch`.
class Ranks {
 public:
  explicit Ranks(ExchangeShape const& shape, int ctas = 2, std::uint32_t first_epoch = 1)
      : s_(shape), ctas_(ctas), layout_(shape), epoch_(first_epoch) {
    for (int r = 0; r < s_.ranks; ++r) {
      ranks_.push_back(std::make_unique<Rank>(s_, ctas, first_epoch));
      fill_words(ranks_.back()->window.get(), first_epoch - 1);
    }
  }
  void set_limits(std::uint64_t limit_ns, std::uint32_t jitter_ns) {
    limit_ns_ = limit_ns;
    jitter_ns_ = jitter_ns;
  }

  // A pass of new choices, or with the tables of one that saved them.
  Pass& make(Exchange const& exchange, Kind kind, std::uint64_t seed, Pass const* of = nullptr) {
    passes_.push_back(std::make_unique<Pass>(Pass{exchange, kind, of, epoch_++, {}}));
    Pass& pass = *passes_.back();
    for (int r = 0; r < s_.ranks; ++r) {
      pass.shares.push_back(std::make_unique<Share>(exchange, r));
      Share& share = *pass.shares.back();
      std::uint64_t const of_rank = seed * 64 + static_cast<std::uint64_t>(r);
      emulator::fill(share.x.get(), static_cast<std::int64_t>(share.x.size()), 2 * of_rank, 1.0f);
      emulator::fill(share.second_x.get(), static_cast<std::int64_t>(share.x.size()),
                     2 * of_rank + 1, 1.0f);
      for (std::int32_t i = 0; i < exchange.pairs(r); ++i) {
        share.scores.push_back(static_cast<float>(i) + static_cast<float>(of_rank) / 1024);
      }
      for (std::int32_t t = 0; t < s_.max_tokens; ++t) {
        std::copy_n(share.x.get() + std::int64_t{t} * s_.hidden, s_.hidden,
                    share.x_with_gaps.get() + t * Share::pitch(s_));
      }
      if (of != nullptr) share.scores = shares(*of, r).scores;
      if (kind.tight) share.capacity = static_cast<std::int64_t>(share.wanted.origins.size());
    }
    return pass;
  }
  Pass& make(Kind kind, std::uint64_t seed, Pass const& of) {
    return make(of.exchange, kind, seed, &of);
  }

  // Enqueues what rank r does, up to `kernels` of them; all: 3. Nothing is looked at unless `checks`.
  void enqueue(Pass& pass, int r, int kernels = 3, bool checks = true) {
    step(r, [this, &pass, r] { place(pass, r); });
    if (kernels > 0 && pass.of == nullptr) {
      launched(launch_route(route_arguments(pass, r), ctas_, &rank(r).stream));
      if (checks) look(pass, r, [this, &pass, r] { return wrong_tables(pass, r); });
    }
    if (kernels > 1 && pass.kind.beside_on(r)) {
      enqueue_beside(pass, r, checks);
    } else if (kernels > 1) {
      DispatchArguments args = dispatch_arguments(pass, r);
      bool const apart = pass.kind.apart_on(r);
      if (apart) args.gmem_second_rows = nullptr;
      if (apart) args.second_x = {};
      launched(launch_dispatch(args, ctas_, &rank(r).stream));
      if (apart) {
        step(r, [this, &pass, r] { place_second_rows(pass, r, rank(r).window.get()); });
        args = dispatch_arguments(pass, r);
        args.gmem_rows = nullptr;
        args.x = args.second_x = {};
        args.zeroed = {};
        if (pass.kind.saves) args.tables = args.saved;
        args.saved = {};
        args.routing = {};
        launched(launch_dispatch(args, 1, &rank(r).stream));
      }
    }
    if (kernels > 1 && checks) look(pass, r, [this, &pass, r] { return wrong_rows(pass, r); });
    if (kernels <= 2) return;
    step(r, [this, &pass, r] { multiply(pass, r); });
    launched(launch_combine(combine_arguments(pass, r), ctas_, &rank(r).stream));
    if (!checks) return;
    look(pass, r, [this, &pass, r] { return wrong_window(pass, r); });
    look(pass, r, [this, &pass, r] { return wrong_o(pass, r); });
    if (pass.kind.dscores) look(pass, r, [this, &pass, r] { return wrong_dscores(pass, r); });
  }
  void enqueue(Pass& pass) {
    for (int r = 0; r < s_.ranks; ++r) enqueue(pass, r);
  }

  // What has been enqueued; what went wrong, but for what ranks report.
  std::string finish(emulator::Schedule const& schedule) {
    std::string const fault = emulator::run(schedule);
    return wrong_.empty() ? fault : wrong_;
  }
  std::string run(emulator::Schedule const& schedule) {
    std::string const wrong = finish(schedule);
    if (!wrong.empty()) return wrong;
    for (int r = 0; r < s_.ranks; ++r) {
      if (!status(r).ok()) return status(r).text();
    }
    return "";
  }
  std::string run(Pass& pass, emulator::Schedule const& schedule) {
    enqueue(pass);
    return run(schedule);
  }

  Status status(int r) const { return fault_status(rank(r).fault, 1); }

  // Words that say which blocks of the fused kernel are done.
  void set_blocks(std::uint32_t value) {
    for (auto const& one : ranks_) {
      for (std::int64_t at = layout_.block_done; at < layout_.counts; at += 4) {
        std::memcpy(one->window.get() + at, &value, sizeof value);
      }
    }
  }
  std::string wrong_arrivals(Pass const& pass, int r) const {
    return shares(pass, r).arrivals[0] == static_cast<unsigned>(ctas_ + 1) ? "" : "arrivals";
  }
  bool blocks_are(std::uint32_t value) const {
    for (auto const& one : ranks_) {
      for (std::int64_t at = layout_.block_done; at < layout_.counts; at += 4) {
        if (std::memcmp(one->window.get() + at, &value, sizeof value) != 0) return false;
      }
    }
    return true;
  }

  // Behind a pass in which rank `owner` had more rows than its limit: what it made of those that it had.
  std::string wrong_rows_of(Pass const& pass, int owner) {
    std::string wrong = wrong_rows(pass, owner);
    for (int r = 0; r < s_.ranks; ++r) {
      char const* const window = rank(r).window.get();
      Memory<char> const image = window_image(pass, r, owner);
      auto const differs = [&](std::int64_t at, std::int64_t bytes) {
        return std::memcmp(window + at, image.get() + (at - layout_.x),
                           static_cast<std::size_t>(bytes)) != 0;
      };
      for (std::int32_t pair = 0; pair < pass.exchange.pairs(r); ++pair) {
        if (!is_routed(pass, r, pair) || s_.owner(pass.exchange.expert(r, pair)) != owner) continue;
        if (differs(layout_.slots + pair * row_bytes(), row_bytes()) ||
            differs(layout_.dscore(pair), 4)) {
          wrong += " rank " + std::to_string(r) + " pair " + std::to_string(pair);
        }
      }
    }
    return wrong;
  }

 private:
  // dispatch by two kernels, which have another number of CTAs.
  void enqueue_beside(Pass& pass, int r, bool checks) {
    DispatchArguments args = dispatch_arguments(pass, r);
    if (!pass.kind.copied) {
      char const* const window = rank(r).window.get();
      args.x = {window + layout_.x, row_bytes()};
      if (pass.kind.second) args.second_x = {window + layout_.second_x, row_bytes()};
      if (pass.kind.apart_on(r)) {
        step(r, [this, &pass, r] { place_second_rows(pass, r, rank(r).window.get()); });
      }
    }
    args.ready_from = r % s_.local_experts();
    args.second_ctas = ctas_;
    launched(launch_begin_dispatch(args, ctas_, &rank(r).stream));
    if (checks) look(pass, r, [this, &pass, r] { return wrong_ready_rows(pass, r); });
    launched(launch_dispatch_beside(args, ctas_ + 1, &rank(r).stream, nullptr));
    if (checks) look(pass, r, [this, &pass, r] { return wrong_arrivals(pass, r); });
  }

  struct Rank {
    CUstream_st stream;
    Memory<char> window, local;
    Memory<std::uint32_t> epoch;
    Tables made;
    Fault fault = {};

    Rank(ExchangeShape const& s, int ctas, std::uint32_t first_epoch)
        : window(WindowLayout(s).bytes, 0),
          local(LocalLayout(s, ctas).bytes, 0),
          epoch(1),
          made(s) {
      epoch[0] = first_epoch;
    }
  };

  Rank& rank(int r) { return *ranks_[static_cast<std::size_t>(r)]; }
  Rank const& rank(int r) const { return *ranks_[static_cast<std::size_t>(r)]; }
  static Share& shares(Pass const& pass, int r) {
    return *pass.shares[static_cast<std::size_t>(r)];
  }
  std::int64_t row_bytes() const { return std::int64_t{2} * s_.hidden; }

  // As passes before the first one would have left them.
  void fill_words(char* window, std::uint32_t epoch) const {
    for (std::int32_t source = 0; source < s_.ranks; ++source) {
      for (std::int64_t const at :
           {layout_.publish_word(source), layout_.ack_word(source), layout_.staged_word(source)}) {
        std::memcpy(window + at, &epoch, sizeof epoch);
      }
      for (std::int32_t e = 0; e < s_.experts; ++e) {
        std::uint64_t const word = CountWord{0, epoch}.word();
        std::memcpy(window + layout_.count_word(0, source, e), &word, sizeof word);
        std::memcpy(window + layout_.count_word(1, source, e), &word, sizeof word);
      }
    }
  }

  void launched(cudaError_t error) {
    if (error != cudaSuccess && wrong_.empty()) wrong_ = "not launched";
  }
  void step(int r, std::function<void()> work) {
    launch_in(&rank(r).stream, 1, 1, 0, std::move(work));
  }
  template <class Check>
  void look(Pass const& pass, int r, Check check) {
    step(r, [this, &pass, r, check] {
      std::string const wrong = check();
      if (wrong.empty() || !wrong_.empty()) return;
      wrong_ = "rank " + std::to_string(r) + " pass " + std::to_string(pass.epoch) + ": " + wrong;
      emulator::fail(wrong_);
    });
  }

  ExchangeArguments arguments(Pass const& pass, int r) {
    std::array<char*, kMaxRanks> windows = {};
    for (std::size_t p = 0; p < ranks_.size(); ++p) windows[p] = ranks_[p]->window.get();
    return {.shape = s_,
            .window = layout_,
            .local = LocalLayout(s_, ctas_),
            .rank = r,
            .windows = Windows(windows),
            .gmem_local = rank(r).local.get(),
            .gmem_epoch = rank(r).epoch.get(),
            .fault = &rank(r).fault,
            .limit_ns = limit_ns_,
            .jitter_ns = jitter_ns_,
            .tokens = pass.exchange.tokens(r),
            .gmem_topk_ids = nullptr,
            .gmem_scores = nullptr,
            .gmem_pool = nullptr};
  }
  RouteArguments route_arguments(Pass& pass, int r) {
    RouteArguments args{
        .exchange = arguments(pass, r),
        .made = rank(r).made.addresses(),
        .row_limit = static_cast<std::int32_t>(shares(pass, r).capacity),
        .host = {pass.kind.saves ? &shares(pass, r).host_rows : nullptr, pass.epoch + 1000}};
    args.exchange.gmem_topk_ids = pass.exchange.ids[static_cast<std::size_t>(r)].data();
    args.exchange.gmem_scores = shares(pass, r).scores.data();
    return args;
  }
  RowTables tables_of(Pass const& pass, int r) {
    return pass.of != nullptr ? shares(*pass.of, r).saved.addresses() : rank(r).made.addresses();
  }
  DispatchArguments dispatch_arguments(Pass const& pass, int r) {
    Share& own = shares(pass, r);
    DispatchArguments args{
        .exchange = arguments(pass, r),
        .tables = tables_of(pass, r),
        .saved = pass.kind.saves ? own.saved.addresses() : RowTables{},
        .capacity = own.capacity,
        .may_overflow = pass.kind.may_overflow,
        .gmem_rows = reinterpret_cast<char*>(own.rows.get()),
        .gmem_second_rows =
            pass.kind.second ? reinterpret_cast<char*>(own.second_rows.get()) : nullptr,
        .gmem_slot_of_pair = own.slot_of_pair.get(),
        .gathered = pass.kind.gathered_on(r),
        .routing =
            pass.of != nullptr ? routing_view(own.routing.get(), own.capacity) : RoutingView{},
        .gmem_ready_blocks = own.ready_blocks.get(),
        .gmem_arrivals = own.arrivals.get()};
    args.exchange.gmem_topk_ids = pass.exchange.ids[static_cast<std::size_t>(r)].data();
    args.zeroed = {own.zeroed.get(), static_cast<std::int32_t>(own.zeroed.size()) - 1};
    if (pass.kind.copied) {
      args.x = {reinterpret_cast<char const*>(own.x_with_gaps.get()), 2 * Share::pitch(s_)};
      if (pass.kind.second) {
        args.second_x = {reinterpret_cast<char const*>(own.second_x.get()), row_bytes()};
      }
    }
    return args;
  }
  // Of a layer of that many grouped rows: routing.hpp.
  RoutingView routing_view(std::int32_t* at, std::int64_t rows) const {
    RoutingView view;
    view.expert_offsets = at;
    view.sort_permutation = view.expert_offsets + s_.local_experts() + 1;
    view.gather_index = view.sort_permutation + rows;
    view.inverse_permutation = view.gather_index + rows;
    view.scores = reinterpret_cast<float*>(view.inverse_permutation + rows);
    return view;
  }
  // Where the row of a pair lies behind dispatch.
  std::int64_t place_of(Pass const& pass, int r, std::int64_t row) const {
    if (!pass.kind.gathered_on(r)) return row;
    RowOrigin const from = shares(pass, r).wanted.origins[static_cast<std::size_t>(row)];
    return std::int64_t{from.source} * s_.max_tokens + from.pair / s_.max_top_k;
  }
  CombineArguments combine_arguments(Pass const& pass, int r) {
    Share& own = shares(pass, r);
    return {
        .exchange = arguments(pass, r),
        .tables = tables_of(pass, r),
        .capacity = own.capacity,
        .gmem_rows = reinterpret_cast<char const*>(own.sent.get()),
        .gmem_dscores = pass.kind.dscores && !pass.kind.partials ? own.row_dscores.get() : nullptr,
        .results = {.gmem_slot_of_pair = own.slot_of_pair.get(),
                    .gmem_scores = weighs(pass) ? own.scores.data() : nullptr,
                    .gmem_o = reinterpret_cast<char*>(own.o.get()),
                    .gmem_pair_dscores = pass.kind.dscores ? own.dscores.get() : nullptr},
        .gmem_ds_partials =
            pass.kind.dscores && pass.kind.partials ? own.ds_partials.get() : nullptr,
        .ds_groups = kPartials};
  }

  // Before the first kernel of a pass: its rows in the window, nothing where results come, nor in tables.
  void place(Pass const& pass, int r) {
    char* const window = rank(r).window.get();
    std::memset(window + layout_.x, 0xff, static_cast<std::size_t>(layout_.bytes - layout_.x));
    if (!pass.kind.copied) {
      place_first_rows(pass, r, window);
      if (pass.kind.second && !pass.kind.apart_on(r)) place_second_rows(pass, r, window);
    }
    if (pass.of != nullptr) return;
    Tables const fresh(s_);
    Tables const& made = rank(r).made;
    std::memcpy(made.offsets.get(), fresh.offsets.get(), 4 * made.offsets.size());
    std::memcpy(made.origins.get(), fresh.origins.get(), sizeof(RowOrigin) * made.origins.size());
    std::memcpy(made.scores.get(), fresh.scores.get(), 4 * made.scores.size());
  }
  void place_first_rows(Pass const& pass, int r, char* window) const {
    auto const bytes = static_cast<std::size_t>(pass.exchange.tokens(r) * row_bytes());
    std::memcpy(window + layout_.x, shares(pass, r).x.get(), bytes);
  }
  void place_second_rows(Pass const& pass, int r, char* window) const {
    auto const bytes = static_cast<std::size_t>(pass.exchange.tokens(r) * row_bytes());
    std::memcpy(window + layout_.second_x, shares(pass, r).second_x.get(), bytes);
  }

  // What becomes of a row between dispatch and combine: another one for every row of every owner.
  Bits result(Pass const& pass, int owner, std::int64_t row, Bits first, Bits second) const {
    auto const tag = static_cast<unsigned>(row * s_.ranks + owner + 1) * 0x9e37u;
    return static_cast<Bits>((first ^ tag) + (pass.kind.second ? 3u * second : 0u));
  }
  static float dscore(Pass const& pass, int owner, std::int64_t row) {
    return static_cast<float>(pass.epoch % 64 * 4096 + static_cast<std::uint32_t>(row)) +
           static_cast<float>(owner) / 4;
  }
  // Of those beyond the row limit, too, so that it shows if they are sent.
  void multiply(Pass const& pass, int r) {
    Share& own = shares(pass, r);
    auto const rows = static_cast<std::int64_t>(own.wanted.origins.size());
    for (std::int64_t row = 0; row < rows; ++row) {
      std::int64_t const from = place_of(pass, r, row) * s_.hidden;
      for (std::int64_t i = 0; i < s_.hidden; ++i) {
        own.sent[row * s_.hidden + i] =
            result(pass, r, row, own.rows[from + i], own.second_rows[from + i]);
      }
      float* const partials = own.ds_partials.get() + kPartials * row;
      own.row_dscores[row] = dscore(pass, r, row);
      partials[0] = own.row_dscores[row] - 5;
      partials[1] = 2;
      partials[2] = 3;
    }
  }

  bool all_fit(Pass const& pass) const {
    return std::all_of(pass.shares.begin(), pass.shares.end(), [](auto const& share) {
      return static_cast<std::int64_t>(share->wanted.origins.size()) <= share->capacity;
    });
  }
  std::string wrong_tables(Pass const& pass, int r) {
    Share const& own = shares(pass, r);
    auto const rows = static_cast<std::int32_t>(own.wanted.origins.size());
    std::uint64_t const word =
        pass.kind.saves ? RoutedWord{rows, all_fit(pass), pass.epoch + 1000}.word() : 0;
    if (own.host_rows != word) return "the host's word";
    return wrong_tables(rank(r).made, pass, r, rows);
  }
  std::string wrong_tables(Tables const& got, Pass const& pass, int r, std::int64_t rows) {
    Share const& own = shares(pass, r);
    Tables const wanted(s_);
    std::transform(own.wanted.offsets.begin(), own.wanted.offsets.end(), wanted.offsets.get(),
                   [rows](std::int32_t offset) { return std::min<std::int64_t>(offset, rows); });
    for (std::int64_t row = 0; row < rows; ++row) {
      RowOrigin const from = own.wanted.origins[static_cast<std::size_t>(row)];
      wanted.origins[row] = from;
      wanted.scores[row] = shares(pass, from.source).scores[static_cast<std::size_t>(from.pair)];
    }
    std::string wrong = compare("offsets", got.offsets.get(), wanted.offsets);
    if (wrong.empty()) wrong = compare("origins", got.origins.get(), wanted.origins);
    return wrong.empty() ? compare("scores", got.scores.get(), wanted.scores) : wrong;
  }

  std::string wrong_rows(Pass const& pass, int r) {
    Share const& own = shares(pass, r);
    Memory<Bits> const first(static_cast<std::int64_t>(own.rows.size()));
    Memory<Bits> const second(static_cast<std::int64_t>(own.rows.size()));
    for (std::int64_t row = 0; row < own.held(); ++row) {
      RowOrigin const from = own.wanted.origins[static_cast<std::size_t>(row)];
      Share const& source = shares(pass, from.source);
      std::int64_t const at = std::int64_t{from.pair / s_.max_top_k} * s_.hidden;
      std::int64_t const to = place_of(pass, r, row) * s_.hidden;
      std::copy_n(source.x.get() + at, s_.hidden, first.get() + to);
      if (!pass.kind.second) continue;
      std::copy_n(source.second_x.get() + at, s_.hidden, second.get() + to);
    }
    if (pass.kind.beside_on(r)) copy_own_tokens(pass, r, first.get());
    Memory<std::int32_t> const slots(static_cast<std::int64_t>(own.slot_of_pair.size()), kNoPair);
    for (std::int32_t pair = 0; pair < pass.exchange.pairs(r); ++pair) {
      slots[pair] = is_routed(pass, r, pair) ? pair : -1;
    }
    std::string wrong = compare("rows", own.rows.get(), first);
    if (wrong.empty()) wrong = compare("second rows", own.second_rows.get(), second);
    if (wrong.empty()) wrong = compare("slots of pairs", own.slot_of_pair.get(), slots);
    Memory<std::int32_t> const zeroed(static_cast<std::int64_t>(own.zeroed.size()), 0);
    zeroed[static_cast<std::int64_t>(zeroed.size()) - 1] = Memory<std::int32_t>(1, kNoPair)[0];
    if (wrong.empty()) wrong = compare("zeroed words", own.zeroed.get(), zeroed);
    if (wrong.empty() && pass.kind.saves) wrong = wrong_tables(own.saved, pass, r, own.held());
    return wrong.empty() ? wrong_routing(pass, r) : wrong;
  }
  // begin_dispatch brings those without rows here, too.
  void copy_own_tokens(Pass const& pass, int r, Bits* rows) const {
    std::int64_t const count = pass.exchange.tokens(r) * std::int64_t{s_.hidden};
    std::copy_n(shares(pass, r).x.get(), count, rows + std::int64_t{r} * s_.max_tokens * s_.hidden);
  }
  // Behind begin_dispatch: this rank's tokens, all tables, and which blocks need no others.
  std::string wrong_ready_rows(Pass const& pass, int r) {
    Share const& own = shares(pass, r);
    Memory<Bits> const first(static_cast<std::int64_t>(own.rows.size()));
    copy_own_tokens(pass, r, first.get());
    std::string const wrong = compare("rows of own tokens", own.rows.get(), first);
    if (!wrong.empty()) return wrong;
    for (std::int32_t e = 0; e < s_.local_experts(); ++e) {
      auto const held = static_cast<std::int32_t>(own.held());
      auto const at = [&](std::int32_t i) {
        return std::min(own.wanted.offsets[static_cast<std::size_t>(i)], held);
      };
      std::int32_t ready = 0;
      for (std::int32_t begin = at(e); begin < at(e + 1); begin += core::kReadyRows) {
        std::int32_t const end = std::min(begin + core::kReadyRows, at(e + 1));
        bool const is_own =
            std::all_of(own.wanted.origins.begin() + begin, own.wanted.origins.begin() + end,
                        [r](RowOrigin const& from) { return from.source == r; });
        if (is_own && e >= r % s_.local_experts()) ++ready;
      }
      if (own.ready_blocks[e] != ready) return "ready blocks of expert " + std::to_string(e);
    }
    return own.arrivals[0] != 0 ? "arrivals before any" : wrong_routing(pass, r);
  }
  // Of a pass with the tables of an earlier one: those that its backward GEMMs read.
  std::string wrong_routing(Pass const& pass, int r) {
    Share const& own = shares(pass, r);
    Memory<std::int32_t> const wanted(static_cast<std::int64_t>(own.routing.size()), kNoPair);
    if (pass.of != nullptr) {
      RoutingView const view = routing_view(wanted.get(), own.capacity);
      std::int64_t const held = own.held();
      std::transform(own.wanted.offsets.begin(), own.wanted.offsets.end(), view.expert_offsets,
                     [held](std::int32_t offset) { return std::min<std::int64_t>(offset, held); });
      for (std::int64_t row = 0; row < own.capacity; ++row) {
        bool const exists = row < held;
        view.sort_permutation[row] = view.inverse_permutation[row] =
            exists ? static_cast<std::int32_t>(row) : -1;
        view.gather_index[row] = exists ? static_cast<std::int32_t>(place_of(pass, r, row)) : 0;
        RowOrigin const from =
            exists ? own.wanted.origins[static_cast<std::size_t>(row)] : RowOrigin{};
        view.scores[row] =
            exists ? shares(pass, from.source).scores[static_cast<std::size_t>(from.pair)] : 0.0f;
      }
    }
    return compare("routing tables", own.routing.get(), wanted);
  }

  // All of a rank's window from x on, behind a pass; what one owner sent to it, or all of them.
  Memory<char> window_image(Pass const& pass, int r, int of_owner = -1) const {
    Memory<char> image(layout_.bytes - layout_.x);
    char* const window = image.get() - layout_.x;
    place_first_rows(pass, r, window);
    if (pass.kind.second) place_second_rows(pass, r, window);
    std::vector<Bits> sent(static_cast<std::size_t>(s_.hidden));
    for (int owner = 0; owner < s_.ranks; ++owner) {
      if (of_owner >= 0 && owner != of_owner) continue;
      for (std::int64_t row = 0; row < shares(pass, owner).held(); ++row) {
        RowOrigin const to = shares(pass, owner).wanted.origins[static_cast<std::size_t>(row)];
        if (to.source != r) continue;
        std::int64_t const at = std::int64_t{to.pair / s_.max_top_k} * s_.hidden;
        for (std::int64_t i = 0; i < s_.hidden; ++i) {
          sent[static_cast<std::size_t>(i)] =
              result(pass, owner, row, shares(pass, r).x[at + i], shares(pass, r).second_x[at + i]);
        }
        std::memcpy(window + layout_.slots + to.pair * row_bytes(), sent.data(),
                    static_cast<std::size_t>(row_bytes()));
        float const back = dscore(pass, owner, row);
        if (pass.kind.dscores) std::memcpy(window + layout_.dscores + 4 * to.pair, &back, 4);
      }
    }
    return image;
  }
  std::string wrong_window(Pass const& pass, int r) {
    if (rank(r).epoch[0] != pass.epoch + 1) return "the epoch";
    return compare("bytes of the window from x on", rank(r).window.get() + layout_.x,
                   window_image(pass, r));
  }
  // As an unfused forward pass does, and backward does not.
  static bool weighs(Pass const& pass) { return pass.of == nullptr; }
  static float value(Bits bits) { return core::to_fp32(core::Bf16{bits}); }
  // Bits, but that all that are no numbers are alike.
  static bool are_alike(Bits a, Bits b) {
    return a == b || (std::isnan(value(a)) && std::isnan(value(b)));
  }
  std::string wrong_o(Pass const& pass, int r) {
    Share const& own = shares(pass, r);
    auto const* const slots = reinterpret_cast<Bits const*>(rank(r).window.get() + layout_.slots);
    Memory<Bits> const wanted(static_cast<std::int64_t>(own.o.size()));
    std::int64_t const k = s_.max_top_k, d = s_.hidden;
    for (std::int64_t t = 0; t < pass.exchange.tokens(r); ++t) {
      for (std::int64_t i = 0; i < d; ++i) {
        float sum = 0;
        for (std::int64_t pair = t * k; pair < (t + 1) * k; ++pair) {
          if (!is_routed(pass, r, static_cast<std::int32_t>(pair))) continue;
          float const weight = weighs(pass) ? own.scores[static_cast<std::size_t>(pair)] : 1.0f;
          sum = std::fma(weight, value(slots[pair * d + i]), sum);
        }
        wanted[t * d + i] = core::round_to<core::Bf16>(sum).bits;
      }
    }
    for (std::size_t i = 0; i < own.o.size(); ++i) {
      if (!are_alike(own.o.get()[i], wanted.get()[i])) return "o differs at " + std::to_string(i);
    }
    return "";
  }
  std::string wrong_dscores(Pass const& pass, int r) {
    Share const& own = shares(pass, r);
    Memory<float> const wanted(static_cast<std::int64_t>(own.dscores.size()));
    std::fill_n(wanted.get(), pass.exchange.pairs(r), 0.0f);
    for (int owner = 0; owner < s_.ranks; ++owner) {
      std::int64_t row = 0;
      for (RowOrigin const& to : shares(pass, owner).wanted.origins) {
        if (to.source == r) wanted[to.pair] = dscore(pass, owner, row);
        ++row;
      }
    }
    return compare("dscores", own.dscores.get(), wanted);
  }
  bool is_routed(Pass const& pass, int r, std::int32_t pair) const {
    std::int32_t const id = pass.exchange.expert(r, pair);
    return id >= 0 && id < s_.experts;
  }

  ExchangeShape s_;
  int ctas_;
  WindowLayout layout_;
  std::uint32_t epoch_;  // of the next pass
  std::uint64_t limit_ns_ = kNoLimit;
  std::uint32_t jitter_ns_ = 0;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<std::unique_ptr<Pass>> passes_;
  std::string wrong_;
};

}  // namespace tessera::expert_parallel::unfused
