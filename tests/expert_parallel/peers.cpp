// SPDX-License-Identifier: Apache-2.0
#include "tests/expert_parallel/peers.hpp"

#include <algorithm>
#include <string>

namespace tessera::expert_parallel::model {

Peers::Peers(Machine& machine, std::int32_t ranks, std::int32_t host_ranks,
             WindowLayout const& window, QueueBreak broken)
    : machine_(machine),
      ranks_(ranks),
      host_ranks_(host_ranks),
      window_bytes_(window.bytes),
      broken_(broken) {
  for (std::int32_t from = 0; from < ranks; ++from) {
    for (std::int32_t to = 0; to < ranks; ++to) {
      if (is_local(from, to)) continue;
      queues_.push_back(std::make_unique<Queue>());
      queues_.back()->from = from;
      queues_.back()->to = to;
      if (broken != QueueBreak::signal_overtakes_put) continue;
      queues_.push_back(std::make_unique<Queue>());
      queues_.back()->from = from;
      queues_.back()->to = to;
      queues_.back()->has_signals = false;
    }
  }
}

void Peers::start() {
  for (std::unique_ptr<Queue> const& queue : queues_) {
    Actor& actor = machine_.add(queue->from, 0,
                                "network from rank " + std::to_string(queue->from) + " to rank " +
                                    std::to_string(queue->to),
                                true);
    machine_.start(actor, network(actor, *queue));
  }
}

Peers::Queue& Peers::queue_of(Actor const& self, std::int32_t to, bool is_signal) {
  bool const apart = broken_ == QueueBreak::signal_overtakes_put;
  return **std::find_if(queues_.begin(), queues_.end(), [&](std::unique_ptr<Queue> const& queue) {
    return queue->from == self.rank && queue->to == to &&
           (!apart || queue->has_signals == is_signal);
  });
}

Program Peers::put(Actor& self, std::int32_t rank, std::int64_t offset, std::int64_t own) {
  Message const message = {.to = {rank, Space::window, offset},
                           .from = {self.rank, Space::window, own}};
  co_await join(self, queue_of(self, rank, false), message,
                broken_ != QueueBreak::put_joins_relaxed);
}

Program Peers::signal(Actor& self, std::int32_t rank, std::int64_t offset, std::uint64_t word,
                      Order order) {
  Address const to = {rank, Space::window, offset};
  if (is_local(self.rank, rank)) {
    if (order == Order::none) {
      co_await self.relaxed(to, word);
    } else {
      co_await self.release(to, word, order == Order::gpu ? Scope::gpu : Scope::sys);
    }
    co_return;
  }
  Message const message = {.is_signal = true, .to = to, .word = word};
  co_await join(self, queue_of(self, rank, true), message, order != Order::none);
}

// The network waits for the message of each number, so who has drawn a number and not filled it holds up the others.
Program Peers::join(Actor& self, Queue& queue, Message message, bool releases) {
  std::uint64_t const number = co_await self.count_relaxed(tail(queue), 1);
  if (queue.messages.size() <= number) queue.messages.resize(number + 1);
  queue.messages[number] = message;
  if (releases) {
    co_await self.release(filled(queue, number), 1, Scope::gpu);
  } else {
    co_await self.relaxed(filled(queue, number), 1);
  }
}

Program Peers::network(Actor& self, Queue& queue) {
  for (std::uint64_t number = 0;; ++number) {
    co_await self.wait_count(filled(queue, number), 1, Site::none);
    Message const message = queue.messages[number];
    if (!message.is_signal) {
      std::uint64_t const value = co_await self.read(message.from);
      co_await self.write(message.to, value);
      continue;
    }
    co_await self
        .proxy_fence();  // who reads by bulk copies needs a fence of its own behind its acquire
    if (broken_ == QueueBreak::signal_arrives_relaxed) {
      co_await self.relaxed(message.to, message.word);
    } else {
      co_await self.release(message.to, message.word, Scope::sys);
    }
  }
}

}  // namespace tessera::expert_parallel::model
