// SPDX-License-Identifier: Apache-2.0
#include "tests/expert_parallel/rails.hpp"

#include <string>

namespace tessera::expert_parallel::model {
namespace {

std::uint64_t x_value(std::int32_t pass, std::int32_t rank) {
  return static_cast<std::uint64_t>(pass) << 32 | static_cast<std::uint64_t>(rank) << 8;
}

std::uint32_t epoch_of(std::int32_t pass) { return static_cast<std::uint32_t>(pass + 1); }

// What the experts of a host add to a token's sum.
std::uint64_t sum_value(std::uint64_t x, std::int32_t host) {
  return x | static_cast<std::uint64_t>(host + 1);
}

}  // namespace

Rails::Rails(RailOptions const& options)
    : options_(options), machine_(options.hosts * options.host_ranks) {
  std::int32_t const ranks = options_.hosts * options_.host_ranks;
  for (std::int32_t r = 0; r < ranks; ++r) {
    machine_.put(word(r, Word::sms), static_cast<std::uint64_t>(options_.sms));
    machine_.add(r, 0, "stream of rank " + std::to_string(r));
    machine_.add(r, 0, "rail of rank " + std::to_string(r));
  }
  for (std::int32_t r = 0; r < ranks; ++r) {
    Actor& runs = machine_.actor(2 * r);
    machine_.start(runs, stream(runs));
    Actor& sends = machine_.actor(2 * r + 1);
    machine_.start(sends, rail(sends));
  }
}

std::int32_t Rails::counterpart(std::int32_t rank, std::int32_t further) const {
  std::int32_t const ranks = options_.hosts * options_.host_ranks;
  return ((rank + further * options_.host_ranks) % ranks + ranks) % ranks;
}

std::vector<Rails::Message> Rails::messages(std::int32_t host) const {
  std::vector<Message> all;
  for (std::int32_t step = 1; step < options_.hosts; ++step) {
    bool const sums_first = !options_.overlap || (breaks(RailBreak::sums_before_rows) && host == 0);
    all.push_back({Kind::rows, step});
    if (sums_first) {
      all.push_back({Kind::sums, step});
    } else if (step > 1) {
      all.push_back({Kind::sums, step - 1});
    }
    if (!sums_first && step == options_.hosts - 1) all.push_back({Kind::sums, step});
  }
  return all;
}

Address Rails::in(std::int32_t rank, Message message) const {
  bool const shared = breaks(RailBreak::one_place_for_all_rows) && message.kind == Kind::rows;
  return memory(rank, Memory::in, shared ? 0 : index(message));
}

// Events of CUDA: the rail waits for what its stream has enqueued before, the stream for the message.
Program Rails::begin(Actor& self, std::int32_t pass, Message message) {
  if (message.kind == Kind::rows) {
    std::uint64_t const x = co_await self.read(memory(self.rank, Memory::x));
    co_await self.write(memory(self.rank, Memory::out, index(message)), x);
  }
  co_await self.release(word(self.rank, Word::begun, index(message)), epoch_of(pass), Scope::gpu);
}

Program Rails::await(Actor& self, std::int32_t pass, Message message) {
  co_await self.wait_at_least(word(self.rank, Word::done, index(message)), epoch_of(pass),
                              Site::none);
}

// In step s a host computes for the host that is s further.
Program Rails::inner_pass(Actor& self, std::int32_t pass, std::int32_t step) {
  auto const sms = static_cast<std::uint64_t>(options_.pass_sms);
  auto const epoch = static_cast<std::uint32_t>(pass * options_.hosts + step + 1);
  co_await self.take(word(self.rank, Word::sms), sms);
  std::int32_t const first = host_of(self.rank) * options_.host_ranks;
  for (std::int32_t r = first; r < first + options_.host_ranks; ++r) {
    co_await self.release(word(r, Word::here, self.rank), epoch, Scope::sys);
  }
  for (std::int32_t r = first; r < first + options_.host_ranks; ++r) {
    co_await self.wait_epoch(word(self.rank, Word::here, r), epoch, Site::none);
  }
  Message const rows = {Kind::rows, step};
  std::uint64_t const x =
      co_await self.read(step == 0 ? memory(self.rank, Memory::x) : in(self.rank, rows));
  if (x != x_value(pass, counterpart(self.rank, step))) machine_.fault("rows of another pass");
  co_await self.write(step == 0 ? memory(self.rank, Memory::first_sum)
                                : memory(self.rank, Memory::out, index({Kind::sums, step})),
                      sum_value(x, host_of(self.rank)));
  co_await self.give(word(self.rank, Word::sms), sms);
}

Program Rails::add_up(Actor& self, std::int32_t pass) {
  for (std::int32_t step = 0; step < options_.hosts; ++step) {
    std::uint64_t const sum = co_await self.read(step == 0 ? memory(self.rank, Memory::first_sum)
                                                           : in(self.rank, {Kind::sums, step}));
    std::int32_t const from = host_of(counterpart(self.rank, -step));
    if (sum != sum_value(x_value(pass, self.rank), from)) machine_.fault("a wrong or old sum");
  }
}

Program Rails::stream(Actor& self) {
  for (std::int32_t pass = 0; pass < options_.passes; ++pass) {
    co_await self.write(memory(self.rank, Memory::x), x_value(pass, self.rank));
    for (std::int32_t step = 0; step < options_.hosts; ++step) {
      Message const rows = {Kind::rows, step}, sums = {Kind::sums, step};
      if (step > 0 && !options_.overlap) co_await begin(self, pass, rows);
      if (step > 0 && !breaks(RailBreak::rows_not_awaited)) co_await await(self, pass, rows);
      if (options_.overlap && step + 1 < options_.hosts) {
        co_await begin(self, pass, {Kind::rows, step + 1});
      }
      bool const early = breaks(RailBreak::sent_before_computed);
      if (step > 0 && early) co_await begin(self, pass, sums);
      co_await inner_pass(self, pass, step);
      if (step > 0 && !early) co_await begin(self, pass, sums);
      if (step > 0 && !options_.overlap) co_await await(self, pass, sums);
    }
    for (std::int32_t step = 1; step < options_.hosts && options_.overlap; ++step) {
      if (!breaks(RailBreak::sums_not_awaited)) co_await await(self, pass, {Kind::sums, step});
    }
    co_await add_up(self, pass);
  }
}

// Rows of a step go to the host that is `step` before this one, sums to the one behind it.
Program Rails::rail(Actor& self) {
  auto const sms = static_cast<std::uint64_t>(options_.rail_sms);
  for (std::int32_t pass = 0; pass < options_.passes; ++pass) {
    for (Message const& message : messages(host_of(self.rank))) {
      std::int32_t const further = message.kind == Kind::rows ? -message.step : message.step;
      std::int32_t const to = counterpart(self.rank, further);
      std::int32_t const from = counterpart(self.rank, -further);
      std::uint32_t const epoch = epoch_of(pass);
      std::int32_t const which = index(message);
      co_await self.wait_at_least(word(self.rank, Word::begun, which), epoch, Site::none);
      co_await self.take(word(self.rank, Word::sms), sms);
      co_await self.release(word(from, Word::ready, which), epoch, Scope::sys);
      co_await self.wait_epoch(word(self.rank, Word::ready, which), epoch, Site::none);
      std::uint64_t const value = co_await self.read(memory(self.rank, Memory::out, which));
      co_await self.write(in(to, message), value);
      co_await self.release(word(to, Word::arrived, which), epoch, Scope::sys);
      co_await self.wait_epoch(word(self.rank, Word::arrived, which), epoch, Site::none);
      co_await self.give(word(self.rank, Word::sms), sms);
      co_await self.release(word(self.rank, Word::done, which), epoch, Scope::gpu);
    }
  }
}

}  // namespace tessera::expert_parallel::model
