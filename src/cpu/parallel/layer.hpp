// SPDX-License-Identifier: Apache-2.0
// The CPU ops share this: the sizes of a call, its weights as strided matrices, and where threads find
// scratch memory. Pointers were checked by src/ops.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/thread_pool.hpp"
#include "cpu/parallel/gemm.hpp"
#include "tessera/moe.hpp"

namespace tessera::cpu {

using core::Bf16;
using core::round_to;
using core::to_fp32;

/// Most rows of one expert that one GEMM computes. A little more than a power of 2: experts that have about one on
/// average are not cut in two.
inline constexpr std::int64_t kRowBlock = 320;
/// Rows of an expert whose products one weight-gradient GEMM adds up.
inline constexpr std::int64_t kReductionBlock = 1024;
/// Tokens of one task of the router's ops, and of aggregate.
inline constexpr std::int64_t kRouterTokens = 256;
inline constexpr std::int64_t kAggregateTokens = 64;
/// Fewest columns of d that a weight-gradient task owns where there are as many, and most.
inline constexpr std::int64_t kColumnBlock = 128, kWideColumnBlock = 512;

/// A [rows, columns] tensor with unit column stride.
template <class T>
struct Rows {
  T* data = nullptr;
  std::int64_t pitch = 0;
  [[nodiscard]] T* operator[](std::int64_t row) const noexcept { return data + row * pitch; }
  [[nodiscard]] MatrixView<T> matrix() const noexcept { return {data, pitch, 1}; }
};
using ConstRows = Rows<float const>;
using MutableRows = Rows<float>;

/// Up weights of every expert. The columns of h (and dh) stand in the order in which w_up stores its rows, so
/// one GEMM serves every order; `separate` weights use two, gate columns first.
template <class T>
struct UpMatrices {
  MatrixView<T> joined;  ///< [w*n, d] of expert 0; not used where separate
  std::int64_t expert_stride = 0;
  MatrixView<T> gate, up;  ///< separate only: [n, d] of expert 0
  std::int64_t gate_expert_stride = 0, up_expert_stride = 0;
  bool separate = false;

  [[nodiscard]] MatrixView<T> of(std::int64_t expert) const noexcept {
    return joined.from_offset(expert * expert_stride);
  }
  [[nodiscard]] MatrixView<T> gate_of(std::int64_t expert) const noexcept {
    return gate.from_offset(expert * gate_expert_stride);
  }
  [[nodiscard]] MatrixView<T> up_of(std::int64_t expert) const noexcept {
    return up.from_offset(expert * up_expert_stride);
  }
};

template <class T>
struct DownMatrices {
  MatrixView<T> matrix;  ///< [d, n] of expert 0
  std::int64_t expert_stride = 0;
  [[nodiscard]] MatrixView<T> of(std::int64_t expert) const noexcept {
    return matrix.from_offset(expert * expert_stride);
  }
};

/// Biases per expert; null where absent. `separate` up biases stand in gate and up, else in gate alone.
template <class T>
struct UpBiases {
  T* gate = nullptr;
  std::int64_t gate_expert_stride = 0;
  T* up = nullptr;
  std::int64_t up_expert_stride = 0;
};
template <class T>
struct DownBiases {
  T* data = nullptr;
  std::int64_t expert_stride = 0;
  [[nodiscard]] T* of(std::int64_t expert) const noexcept { return data + expert * expert_stride; }
};

/// T: the storage type, float or Bf16.
template <class T>
struct Layer {
  MoeDesc const& desc;
  RoutingView routing;
  UpMatrices<T const> w_up;
  DownMatrices<T const> w_down;
  UpBiases<T const> b_up;
  DownBiases<T const> b_down;
  WeightCodes weight_codes = {};  ///< with MoeDesc::weight_codes: in place of w_up and w_down

  [[nodiscard]] std::int64_t tokens() const noexcept { return desc.shape.tokens; }
  [[nodiscard]] std::int64_t hidden() const noexcept { return desc.shape.hidden; }
  [[nodiscard]] std::int64_t intermediate() const noexcept { return desc.shape.intermediate; }
  [[nodiscard]] std::int64_t up_columns() const noexcept {
    return desc.up_width() * desc.shape.intermediate;
  }
  [[nodiscard]] std::int64_t experts() const noexcept { return desc.shape.experts; }
  [[nodiscard]] std::int64_t slots() const noexcept { return desc.num_slots(); }
  [[nodiscard]] std::int64_t first_row(std::int64_t expert) const noexcept {
    return routing.expert_offsets[expert];
  }
  [[nodiscard]] std::int64_t num_rows(std::int64_t expert) const noexcept {
    return routing.expert_offsets[expert + 1] - routing.expert_offsets[expert];
  }
  /// Counts those of a product with the rows of all experts, and as many for the matrices themselves, which are read or
  /// written.
  [[nodiscard]] std::int64_t multiply_adds() const noexcept {
    return (first_row(experts()) + experts()) * hidden() * intermediate();
  }
};

/// Slots of one token: [first, end).
struct SlotRange {
  std::int64_t first, end;
};
inline SlotRange slots_of(MoeDesc const& desc, RoutingView const& routing,
                          std::int64_t token) noexcept {
  if (routing.token_offsets != nullptr) {
    return {routing.token_offsets[token], routing.token_offsets[token + 1]};
  }
  return {token * desc.shape.top_k, (token + 1) * desc.shape.top_k};
}

/// Columns of d that a call computes; y and dx rows hold these alone.
struct Columns {
  std::int64_t first = 0, count = 0;
};
/// Most columns of y or dx rows that exist at a time.
inline std::int64_t column_chunk(MoeDesc const& desc) noexcept {
  std::int64_t const d = desc.shape.hidden;
  return desc.column_chunk == 0 ? d : std::min<std::int64_t>(desc.column_chunk, d);
}
/// body(columns) for every chunk, first to last.
template <class Body>
void for_each_column_chunk(MoeDesc const& desc, Body&& body) noexcept {
  std::int64_t const d = desc.shape.hidden, chunk = column_chunk(desc);
  for (std::int64_t first = 0; first < d; first += chunk) {
    body(Columns{first, std::min(chunk, d - first)});
  }
}

/// Threads, and `floats_per_thread` floats of scratch for each.
struct Threads {
  core::ThreadPool& pool;
  float* scratch_base = nullptr;
  std::int64_t floats_per_thread = 0;

  [[nodiscard]] float* scratch(int slot) const noexcept {
    return scratch_base + slot * floats_per_thread;
  }
};

/// At most kRowBlock rows of one expert.
struct RowBlock {
  std::int64_t expert, row, rows;
  int slot;
  Panels weights;  ///< those of the expert, in the slot's scratch
};

/// Rows of all experts that a task may have where tasks abound: a quarter of a thread's part.
inline std::int64_t rows_per_task(std::int64_t rows, Threads const& threads) noexcept {
  return rows / (4 * threads.pool.num_threads());
}

/// body(RowBlock) for all rows, an expert's blocks being about equal. A task has several blocks of its expert where
/// tasks abound; no bit depends on it. Groups: a Layer, or what else has its experts, num_rows, first_row and
/// multiply_adds.
template <class Groups, class Body>
void for_each_row_block(Groups const& groups, Threads const& threads, Body&& body) noexcept {
  // A task finds its expert by walking the offsets: E steps, against rows*d*n of work.
  std::int64_t const experts = groups.experts();
  std::int64_t const most_rows =
      std::max(kRowBlock, rows_per_task(groups.first_row(experts), threads));
  auto const num_tasks = [&](std::int64_t expert) {
    return (groups.num_rows(expert) + most_rows - 1) / most_rows;
  };
  std::int64_t tasks = 0;
  for (std::int64_t e = 0; e < experts; ++e) tasks += num_tasks(e);
  auto const run_task = [&](std::int64_t task, int slot) {
    std::int64_t expert = 0;
    for (; task >= num_tasks(expert); ++expert) task -= num_tasks(expert);
    std::int64_t const all = groups.num_rows(expert), parts = num_tasks(expert);
    std::int64_t const first = all * task / parts, rows = all * (task + 1) / parts - first;
    std::int64_t const blocks = (rows + kRowBlock - 1) / kRowBlock;
    for (std::int64_t block = 0; block < blocks; ++block) {
      std::int64_t const begin = rows * block / blocks, end = rows * (block + 1) / blocks;
      body(RowBlock{.expert = expert,
                    .row = groups.first_row(expert) + first + begin,
                    .rows = end - begin,
                    .slot = slot,
                    .weights = blocks == 1  ? Panels::used_once
                               : block == 0 ? Panels::kept
                                            : Panels::reused});
    }
  };
  threads.pool.run(tasks, run_task, groups.multiply_adds());
}

/// Columns of d of a weight-gradient task: the more, the seldomer the other side is packed. The largest expert's rows
/// stay within the share of a task as long as that leaves kColumnBlock columns. No sum depends on it.
template <class T>
std::int64_t columns_per_task(Layer<T> const& layer, Threads const& threads) noexcept {
  std::int64_t most_rows = 1;
  for (std::int64_t e = 0; e < layer.experts(); ++e) {
    most_rows = std::max(most_rows, layer.num_rows(e));
  }
  std::int64_t const columns =
      layer.hidden() * rows_per_task(layer.first_row(layer.experts()), threads) / most_rows;
  return std::clamp(columns / kColumnBlock * kColumnBlock, kColumnBlock, kWideColumnBlock);
}

/// body(expert, first_column, columns, slot) for every block of at most kWideColumnBlock columns of d.
template <class T, class Body>
void for_each_column_block(Layer<T> const& layer, Threads const& threads, Body&& body) noexcept {
  std::int64_t const most = columns_per_task(layer, threads);
  std::int64_t const blocks = (layer.hidden() + most - 1) / most;
  auto const run_task = [&](std::int64_t task, int slot) {
    std::int64_t const first = task % blocks * most;
    body(task / blocks, first, std::min(most, layer.hidden() - first), slot);
  };
  threads.pool.run(layer.experts() * blocks, run_task, layer.multiply_adds());
}

}  // namespace tessera::cpu
