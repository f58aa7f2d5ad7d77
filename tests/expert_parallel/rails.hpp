// SPDX-License-Identifier: Apache-2.0
// Passes over several hosts as tessera/hosts/rotation.py enqueues them, on GPUs whose SMs are counted. A rank has two
// actors, its stream and its rail, each of which does one thing after the other:
//   stream   takes SMs for a pass, waits in it for the ranks of its host, and gives them back. What a pass does besides
//            is the model of passes.hpp
//   rail     NCCL's kernels: each takes SMs, waits for its counterparts, sends a message and receives another
// A kernel takes its SMs at once and keeps them until its end. Which of two that are ready comes first nobody says.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/expert_parallel/machine.hpp"

namespace tessera::expert_parallel::model {

/// A rule of the rotation that is not kept.
enum class RailBreak {
  nothing,
  rows_not_awaited,        // a pass begins before the rows of its step have come
  sums_not_awaited,        // neither are sums when they are added up
  sent_before_computed,    // sums are sent while their pass runs
  one_place_for_all_rows,  // of the steps
  sums_before_rows,        // on host 0: in another order than on the others
};

struct RailOptions {
  std::int32_t hosts = 2, host_ranks = 2, passes = 2;
  std::int32_t sms = 8;  ///< of a GPU
  std::int32_t pass_sms = 6, rail_sms = 2;
  bool overlap = true;
  RailBreak broken = RailBreak::nothing;
};

class Rails : public World {
 public:
  explicit Rails(RailOptions const& options);
  Machine& machine() override { return machine_; }

 private:
  enum class Kind : std::int32_t { rows, sums };
  /// A message of a rank in a pass: rows of a step, or the sums that the step's pass has made of them.
  struct Message {
    Kind kind;
    std::int32_t step;
  };

  Program stream(Actor& self);
  Program rail(Actor& self);
  Program begin(Actor& self, std::int32_t pass, Message message);
  Program await(Actor& self, std::int32_t pass, Message message);
  Program inner_pass(Actor& self, std::int32_t pass, std::int32_t step);
  Program add_up(Actor& self, std::int32_t pass);

  [[nodiscard]] bool breaks(RailBreak b) const { return options_.broken == b; }
  [[nodiscard]] std::int32_t host_of(std::int32_t rank) const { return rank / options_.host_ranks; }
  /// The rank on another host, so many hosts further, that has the same place there.
  [[nodiscard]] std::int32_t counterpart(std::int32_t rank, std::int32_t further) const;
  /// In the order of the rail.
  [[nodiscard]] std::vector<Message> messages(std::int32_t host) const;
  [[nodiscard]] static std::int32_t index(Message message) {
    return 2 * message.step + static_cast<std::int32_t>(message.kind);
  }

  // Words and memory of a rank. Words but `sms` have the number of the pass, from 1 on; `here` counts steps, too.
  enum class Word : std::int64_t { sms, begun, done, ready, arrived, here };
  [[nodiscard]] static Address word(std::int32_t rank, Word of, std::int64_t number = 0) {
    return {rank, Space::shared, static_cast<std::int64_t>(of) << 32 | number};
  }
  enum class Memory : std::int64_t { x, out, in, first_sum };
  [[nodiscard]] static Address memory(std::int32_t rank, Memory of, std::int64_t number = 0) {
    return {rank, Space::local, static_cast<std::int64_t>(of) << 32 | number};
  }
  [[nodiscard]] Address in(std::int32_t rank, Message message) const;

  RailOptions options_;
  Machine machine_;
};

}  // namespace tessera::expert_parallel::model
