// SPDX-License-Identifier: Apache-2.0
// How the ranks of the model reach each other's windows, as src/expert_parallel/transport/peer.cuh is how kernels do.
// Ranks of one host address each other's memory. A rank of another host is reached by messages alone: `put` copies from
// the own window to the other one, `signal` writes a word there, and both only join a queue. Each pair of ranks has one
// queue, and an actor of its own, the network, delivers messages in their order whenever the scheduler lets it:
//   put      the network reads the own window when it comes to the message, not before. What it writes at the other
//            end arrives there at any time until the next signal does
//   signal   arrives after all that joined the queue before it, whichever actor of the rank that was from
// The network outlives kernels, so the end of a pass says nothing about what is still in a queue.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "expert_parallel/plan/protocol.hpp"
#include "tests/expert_parallel/machine.hpp"

namespace tessera::expert_parallel::model {

/// A rule of the queues that is not kept.
enum class QueueBreak {
  nothing,
  signal_overtakes_put,  // signals have a queue of their own
  put_joins_relaxed,     // what is put was not released to the network
  signal_arrives_relaxed
};

/// The order that a signal brings with it.
enum class Order { none, gpu, sys };

class Peers {
 public:
  /// hosts of `host_ranks` ranks; 0: one host.
  Peers(Machine& machine, std::int32_t ranks, std::int32_t host_ranks, WindowLayout const& window,
        QueueBreak broken);
  /// Actors of the networks, behind all others.
  void start();

  [[nodiscard]] bool is_local(std::int32_t from, std::int32_t to) const {
    return host_ranks_ == 0 || from / host_ranks_ == to / host_ranks_;
  }
  /// A place in the window of `rank`; none: it is reached by messages alone.
  [[nodiscard]] std::optional<Address> load_if_local(Actor const& self, std::int32_t rank,
                                                     std::int64_t offset) const {
    if (!is_local(self.rank, rank)) return std::nullopt;
    return Address{rank, Space::window, offset};
  }
  [[nodiscard]] std::optional<Address> store_if_local(Actor const& self, std::int32_t rank,
                                                      std::int64_t offset) const {
    return load_if_local(self, rank, offset);
  }
  /// From a place in the own window, which nobody may write before the message has been delivered.
  Program put(Actor& self, std::int32_t rank, std::int64_t offset, std::int64_t own);
  Program signal(Actor& self, std::int32_t rank, std::int64_t offset, std::uint64_t word,
                 Order order);

  // What windows of ranks of several hosts have besides those of one.
  /// Where a push to this place of a rank's window is staged: a place for each, in the own window.
  [[nodiscard]] std::int64_t staged(std::int32_t rank, std::int64_t offset) const {
    return window_bytes_ * (1 + rank) + offset;
  }
  /// The row that `source` sends of a token, as nobody can load it.
  [[nodiscard]] std::int64_t sent_x_row(std::int32_t source, std::int64_t x_row) const {
    return window_bytes_ * (1 + ranks_ + source) + x_row;
  }

 private:
  struct Message {
    bool is_signal = false;
    Address to = {}, from = {};
    std::uint64_t word = 0;
  };
  struct Queue {
    std::int32_t from = 0, to = 0;
    bool has_signals = true;  // else they are in another queue
    std::deque<Message> messages;
  };
  Program join(Actor& self, Queue& queue, Message message, bool releases);
  Program network(Actor& self, Queue& queue);
  Queue& queue_of(Actor const& self, std::int32_t to, bool is_signal);
  // Numbers that have been given out, and whether the message of a number may be taken.
  [[nodiscard]] Address tail(Queue const& queue) const { return word_of(queue, 0); }
  [[nodiscard]] Address filled(Queue const& queue, std::uint64_t number) const {
    return word_of(queue, 1 + static_cast<std::int64_t>(number));
  }
  [[nodiscard]] static Address word_of(Queue const& queue, std::int64_t number) {
    return {queue.from, Space::shared,
            std::int64_t{1} << 53 | std::int64_t{queue.has_signals} << 48 |
                std::int64_t{queue.to} << 40 | number};
  }

  Machine& machine_;
  std::int32_t ranks_, host_ranks_;
  std::int64_t window_bytes_;
  QueueBreak broken_;
  std::vector<std::unique_ptr<Queue>> queues_;
};

}  // namespace tessera::expert_parallel::model
