// SPDX-License-Identifier: Apache-2.0
// Several GPUs as far as memory order goes. Actors are coroutines that await one operation at a time; a
// scheduler picks who is next, so a run is a function of its seed.
//
// Two judges watch every access:
//   values     writes wait in the actor's buffer and reach memory in any order, at any time, until a
//              release of the actor; bulk writes until the actor has waited for them
//   order      vector clocks: an access that no chain of releases and acquires of sufficient scope puts
//              after the write it meets, or a write after the reads of what it replaces, is a fault in
//              every schedule, not only in those where it hurts. Other GPUs learn of a write by a release at
//              system scope alone, of its actor or of one of its GPU that has acquired it. Fences between
//              proxies are demanded likewise.
#pragma once

#include <array>
#include <coroutine>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "expert_parallel/plan/protocol.hpp"

namespace tessera::expert_parallel::model {

enum class Scope { gpu, sys };
enum class Proxy { generic, async };  // loads and stores; bulk copies and TMA
enum class Space { window, local, x_pool, a, shared };

struct Address {
  std::int32_t rank;
  Space space;
  std::int64_t offset;
  [[nodiscard]] std::uint64_t key() const {
    return static_cast<std::uint64_t>(rank) << 58 | static_cast<std::uint64_t>(space) << 54 |
           static_cast<std::uint64_t>(offset);
  }
};

constexpr int kMaxActors = 48;
using Clock = std::array<std::uint32_t, kMaxActors>;
inline void join(Clock& to, Clock const& from) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] = std::max(to[i], from[i]);
}

enum class Kind {
  read,
  write,
  copy,          // a bulk store: what stands in shared memory when it is read
  wait_read,     // cp.async.bulk.wait_group.read 0: shared memory may be written again
  wait_written,  // cp.async.bulk.wait_group 0
  proxy_fence,
  release,  // store
  relaxed,  // store that orders nothing
  count,    // atomic add, acquire and release
  count_relaxed,
  wait,
  look,      // whether a wait would be over; acquires nothing
  take,      // of what a word holds, once it holds as much: SMs of a GPU; orders nothing
  give,      // back
  boundary,  // of kernels: all actors of the rank meet
};
enum class Until { at_least_epoch, equal, carries_epoch };  // the last: in its upper half, at least

struct Operation {
  Kind kind;
  Address address = {};
  Address from = {};  // of a copy
  std::uint64_t value = 0;
  Scope scope = Scope::gpu;
  Proxy proxy = Proxy::generic;
  Until until = Until::equal;
  Site site = Site::none;
};

// A coroutine that awaits operations and other programs.
class Program {
 public:
  struct promise_type {
    std::coroutine_handle<> caller = std::noop_coroutine();
    Program get_return_object() {
      return Program(std::coroutine_handle<promise_type>::from_promise(*this));
    }
    std::suspend_always initial_suspend() noexcept { return {}; }
    struct Return {
      bool await_ready() noexcept { return false; }
      std::coroutine_handle<> await_suspend(std::coroutine_handle<promise_type> h) noexcept {
        return h.promise().caller;
      }
      void await_resume() noexcept {}
    };
    Return final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { std::terminate(); }
  };

  explicit Program(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  Program(Program&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Program& operator=(Program&&) = delete;
  ~Program() {
    if (handle_) handle_.destroy();
  }
  [[nodiscard]] std::coroutine_handle<> handle() const { return handle_; }
  [[nodiscard]] bool done() const { return handle_.done(); }

  // co_await of a program runs it to its end.
  bool await_ready() noexcept { return false; }
  std::coroutine_handle<> await_suspend(std::coroutine_handle<> caller) noexcept {
    handle_.promise().caller = caller;
    return handle_;
  }
  void await_resume() noexcept {}

 private:
  std::coroutine_handle<promise_type> handle_;
};

class Machine;

class Actor {
 public:
  struct Await {
    Actor& actor;
    bool await_ready() noexcept { return false; }
    void await_suspend(std::coroutine_handle<> h) noexcept { actor.at_ = h; }
    std::uint64_t await_resume() noexcept { return actor.result_; }
  };
  Actor(int id, std::int32_t rank, std::int32_t cta, std::string name, bool outlives_kernels)
      : id(id), rank(rank), cta(cta), name(std::move(name)), outlives_kernels(outlives_kernels) {}

  Await read(Address a, Proxy proxy = Proxy::generic) {
    return ask({.kind = Kind::read, .address = a, .proxy = proxy});
  }
  Await write(Address a, std::uint64_t value, Proxy proxy = Proxy::generic) {
    return ask({.kind = Kind::write, .address = a, .value = value, .proxy = proxy});
  }
  Await copy(Address from, Address to) {
    return ask({.kind = Kind::copy, .address = to, .from = from, .proxy = Proxy::async});
  }
  Await wait_read() { return ask({.kind = Kind::wait_read}); }
  Await wait_written() { return ask({.kind = Kind::wait_written}); }
  Await proxy_fence() { return ask({.kind = Kind::proxy_fence}); }
  Await release(Address a, std::uint64_t value, Scope scope) {
    return ask({.kind = Kind::release, .address = a, .value = value, .scope = scope});
  }
  Await relaxed(Address a, std::uint64_t value) {
    return ask({.kind = Kind::relaxed, .address = a, .value = value});
  }
  Await count(Address a, std::uint64_t increment) {
    return ask({.kind = Kind::count, .address = a, .value = increment});
  }
  Await count_relaxed(Address a, std::uint64_t increment) {
    return ask({.kind = Kind::count_relaxed, .address = a, .value = increment});
  }
  // A counter of this GPU that has to reach `value`.
  Await wait_count(Address a, std::uint64_t value, Site site) {
    return ask({.kind = Kind::wait, .address = a, .value = value, .site = site});
  }
  Await wait_at_least(Address a, std::uint64_t value, Site site) {
    return ask({.kind = Kind::wait,
                .address = a,
                .value = value,
                .until = Until::at_least_epoch,
                .site = site});
  }
  // A word of any GPU that has to reach `epoch`.
  Await wait_epoch(Address a, std::uint32_t epoch, Site site) {
    return ask({.kind = Kind::wait,
                .address = a,
                .value = epoch,
                .scope = Scope::sys,
                .until = Until::at_least_epoch,
                .site = site});
  }
  // A word whose lower half is what its upper half, an epoch, says is there: the outcome. It orders nothing.
  Await wait_carried(Address a, std::uint32_t epoch, Site site) {
    return ask({.kind = Kind::wait,
                .address = a,
                .value = epoch,
                .scope = Scope::sys,
                .until = Until::carries_epoch,
                .site = site});
  }
  Await look(Address a, std::uint64_t value, Until until = Until::equal) {
    return ask({.kind = Kind::look, .address = a, .value = value, .until = until});
  }
  Await take(Address a, std::uint64_t amount) {
    return ask({.kind = Kind::take, .address = a, .value = amount});
  }
  Await give(Address a, std::uint64_t amount) {
    return ask({.kind = Kind::give, .address = a, .value = amount});
  }
  Await boundary() { return ask({.kind = Kind::boundary}); }
  Await ask(Operation const& operation) {
    next_ = operation;
    return {*this};
  }

  int const id;
  std::int32_t const rank, cta;
  std::string const name;
  // A part of its rank that no kernel starts or ends: it meets nobody at boundaries, and a run does not wait for its
  // end.
  bool const outlives_kernels;

 private:
  friend class Machine;
  struct Write {
    std::uint64_t key, value;
    Proxy proxy;
    std::uint64_t from = kNowhere;  // a copy that has not read its value yet
  };
  static constexpr std::uint64_t kNowhere = ~std::uint64_t{0};
  std::unique_ptr<Program> program_;
  std::coroutine_handle<> at_;
  Operation next_ = {};
  std::uint64_t result_ = 0;
  bool done_ = false, at_boundary_ = false;
  std::vector<Write> buffer_;
  std::vector<std::uint64_t> bulk_;     // cells of bulk writes that were not waited for
  std::vector<std::uint64_t> reading_;  // and of copies' sources, until they were read
  Clock clock_ = {};
  std::uint32_t proxy_fences_ = 0;
  Clock proxy_clock_ = {};  // as of the latest proxy fence: what async reads may rely on
  std::uint64_t history_ = 0;
};

class Machine {
 public:
  explicit Machine(std::int32_t ranks) : ranks_(ranks) {}

  Actor& add(std::int32_t rank, std::int32_t cta, std::string name, bool outlives_kernels = false);
  void start(Actor& actor, Program program);

  /// What a word holds before anything runs.
  void put(Address a, std::uint64_t value) { words_[a.key()].value = value; }

  /// Actors that can run now.
  [[nodiscard]] std::vector<int> runnable() const;
  /// One operation of an actor that can run.
  void step(int actor);
  /// Operations of one actor up to the next one whose order among actors can matter.
  void settle(int actor);
  /// One write of an actor's buffer reaches memory; false if there is none.
  bool drain(int actor, std::mt19937_64& rng);
  [[nodiscard]] bool has_writes(int actor) const;
  /// From now on values alone judge: what a schedule happens to show.
  void ignore_order() { ignore_order_ = true; }
  /// This rank's actors do nothing any more.
  void kill(std::int32_t rank) { killed_ |= 1u << rank; }

  void fault(std::string text) {
    if (fault_.empty()) fault_ = std::move(text);
  }
  [[nodiscard]] std::string const& fault() const { return fault_; }
  [[nodiscard]] bool finished() const;
  [[nodiscard]] Actor& actor(int id) { return at(id); }
  [[nodiscard]] int actors() const { return static_cast<int>(actors_.size()); }
  [[nodiscard]] std::int32_t rank_of(int actor) const { return at(actor).rank; }
  /// Who waits where, for what, and what stands there.
  [[nodiscard]] std::string waiters() const;
  /// Actors of a rank that is alive that wait for a word that does not come; their sites.
  [[nodiscard]] std::vector<Site> waiting_sites(std::int32_t rank) const;
  /// Whether this rank has come to the end of all its programs.
  [[nodiscard]] bool finished(std::int32_t rank) const;
  /// Equal for states that differ by nothing that can matter.
  [[nodiscard]] std::uint64_t fingerprint() const;
  [[nodiscard]] std::int64_t steps() const { return steps_; }

 private:
  static constexpr std::uint32_t kUnwritten = 0xffffffffu;
  struct Cell {
    std::uint64_t value = 0;
    int writer = -1;
    std::uint32_t written = 0;  // the writer's clock; kUnwritten until a bulk write was waited for
    std::uint32_t proxy_fences = 0;
    Proxy proxy = Proxy::generic;
    std::uint32_t copies = 0;  // that may still read it
    std::vector<std::pair<int, std::uint32_t>> readers;
  };
  struct Word {
    std::uint64_t value = 0;
    Clock sys = {}, local = {};  // what an acquire of another, of the same GPU learns
    std::int32_t rank = -1;
  };

  [[nodiscard]] Actor& at(int id) { return actors_[static_cast<std::size_t>(id)]; }
  [[nodiscard]] Actor const& at(int id) const { return actors_[static_cast<std::size_t>(id)]; }
  [[nodiscard]] bool can_run(Actor const& a) const;
  [[nodiscard]] bool satisfied(Operation const& o) const;
  void execute(Actor& a);
  void resume(Actor& a);
  void do_read(Actor& a);
  void do_write(Actor& a);
  void do_release(Actor& a, Word& word);
  void acquire(Actor& a, Word const& word);
  void do_boundary(std::int32_t rank);
  [[nodiscard]] std::uint64_t own_value(Actor const& a, std::uint64_t key);
  void wait_read(Actor& a);
  void wait_written(Actor& a);
  void drain_generic(Actor& a);
  void judge_read(Actor& a, Cell const& cell);
  void judge_write(Actor const& a, Cell const& cell);
  void race(Actor const& a, char const* what, Cell const& cell);

  std::int32_t ranks_;
  std::deque<Actor> actors_;
  std::unordered_map<std::uint64_t, Cell> cells_;
  std::unordered_map<std::uint64_t, Word> words_;
  std::string fault_;
  std::uint32_t killed_ = 0;
  bool ignore_order_ = false;
  std::int64_t steps_ = 0;
};

/// How a random schedule treats the actors.
enum class Temper { even, starve, run_ahead, late_writes };

/// Runs to the end, to a fault, until nobody can run, or for so many steps; a function of the seed.
void run_random(Machine& machine, Temper temper, std::uint64_t seed,
                std::int64_t steps = std::int64_t{1} << 60);

/// A machine with all that its programs refer to.
class World {
 public:
  virtual ~World() = default;
  virtual Machine& machine() = 0;
};

struct Exploration {
  std::int64_t states = 0;
  bool complete = false;  // within the limit
  std::string fault;      // the first
};
/// Every order of the operations that do not commute, up to states seen before; at most `limit` states.
Exploration explore(std::function<std::unique_ptr<World>()> const& make, std::int64_t limit);

}  // namespace tessera::expert_parallel::model
