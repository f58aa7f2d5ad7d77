// SPDX-License-Identifier: Apache-2.0
#include "tests/expert_parallel/machine.hpp"

#include <algorithm>
#include <unordered_set>

namespace tessera::expert_parallel::model {
namespace {

// Whose order among several actors can matter: additions to one counter, and looks at it, return different values, and
// what one takes another cannot. All others commute, or can happen in one order only: a word has one writer at a time,
// a wait that is over stays over, and what is given back early leaves all orders of taking it.
bool order_matters(Kind kind) {
  return kind == Kind::count || kind == Kind::count_relaxed || kind == Kind::look ||
         kind == Kind::take;
}

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

}  // namespace

Actor& Machine::add(std::int32_t rank, std::int32_t cta, std::string name, bool outlives_kernels) {
  int const id = actors();
  if (id >= kMaxActors) std::terminate();
  actors_.emplace_back(id, rank, cta, std::move(name), outlives_kernels);
  actors_.back().clock_[static_cast<std::size_t>(id)] = 1;
  return actors_.back();
}

void Machine::start(Actor& actor, Program program) {
  actor.program_ = std::make_unique<Program>(std::move(program));
  actor.at_ = actor.program_->handle();
  resume(actor);
}

void Machine::resume(Actor& a) {
  a.at_.resume();
  a.done_ = a.program_->done();
}

bool Machine::satisfied(Operation const& o) const {
  auto const found = words_.find(o.address.key());
  std::uint64_t const word = found == words_.end() ? 0 : found->second.value;
  if (o.kind == Kind::take) return word >= o.value;
  auto const seen = static_cast<std::uint32_t>(o.until == Until::carries_epoch ? word >> 32 : word);
  auto const wanted = static_cast<std::uint32_t>(o.value);
  return o.until == Until::equal ? seen == wanted : reached(seen, wanted);
}

bool Machine::can_run(Actor const& a) const {
  if (a.done_ || a.at_boundary_ || (killed_ >> a.rank & 1u) != 0) return false;
  bool const waits = a.next_.kind == Kind::wait || a.next_.kind == Kind::take;
  return !waits || satisfied(a.next_);
}

std::vector<int> Machine::runnable() const {
  std::vector<int> found;
  for (Actor const& a : actors_) {
    if (can_run(a)) found.push_back(a.id);
  }
  return found;
}

bool Machine::finished() const {
  return std::all_of(actors_.begin(), actors_.end(),
                     [](Actor const& a) { return a.done_ || a.outlives_kernels; });
}

bool Machine::has_writes(int actor) const {
  return !at(actor).buffer_.empty() && (killed_ >> at(actor).rank & 1u) == 0;
}

void Machine::step(int actor) {
  Actor& a = at(actor);
  ++steps_;
  Kind const kind = a.next_.kind;
  a.history_ = mix(a.history_, static_cast<std::uint64_t>(kind) << 56 ^ a.next_.address.key());
  execute(a);
  if (kind == Kind::boundary) return;  // resumed with the others of its rank
  if (kind == Kind::count || kind == Kind::read || kind == Kind::look)
    a.history_ = mix(a.history_, a.result_);
  resume(a);
}

void Machine::settle(int actor) {
  while (fault_.empty() && can_run(at(actor)) && !order_matters(at(actor).next_.kind)) step(actor);
}

void Machine::execute(Actor& a) {
  Operation const& o = a.next_;
  a.result_ = 0;
  switch (o.kind) {
    case Kind::read:
      return do_read(a);
    case Kind::write:
    case Kind::copy:
      return do_write(a);
    case Kind::wait_read:
      return wait_read(a);
    case Kind::wait_written:
      return wait_written(a);
    case Kind::proxy_fence:
      ++a.proxy_fences_;
      a.proxy_clock_ = a.clock_;
      return;
    case Kind::release: {
      Word& word = words_[o.address.key()];
      word.sys = word.local = {};  // a store begins a new chain
      do_release(a, word);
      word.value = o.value;
      return;
    }
    case Kind::relaxed: {
      Word& word = words_[o.address.key()];
      word.sys = word.local = {};
      word.value = o.value;
      return;
    }
    case Kind::count: {
      Word& word = words_[o.address.key()];
      acquire(a, word);
      do_release(a, word);
      a.result_ = word.value;
      word.value += static_cast<std::uint32_t>(o.value);
      return;
    }
    case Kind::count_relaxed: {
      Word& word = words_[o.address.key()];
      a.result_ = word.value;
      word.value += static_cast<std::uint32_t>(o.value);
      return;
    }
    case Kind::wait: {
      Word const& word = words_[o.address.key()];
      acquire(a, word);
      a.result_ = word.value;
      return;
    }
    case Kind::look:
      a.result_ = satisfied(o) ? 1 : 0;
      return;
    case Kind::take:
      words_[o.address.key()].value -= o.value;
      return;
    case Kind::give:
      words_[o.address.key()].value += o.value;
      return;
    case Kind::boundary:
      a.at_boundary_ = true;
      return do_boundary(a.rank);
  }
}

void Machine::race(Actor const& a, char const* what, Cell const& cell) {
  Address const& where = a.next_.address;
  fault(std::string(what) + ": " + a.name + " at rank " + std::to_string(where.rank) + " space " +
        std::to_string(static_cast<int>(where.space)) + " offset " + std::to_string(where.offset) +
        (cell.writer < 0 ? "" : ", written by " + at(cell.writer).name));
}

void Machine::judge_read(Actor& a, Cell const& cell) {
  if (cell.writer < 0) return race(a, "read before any write", cell);
  if (cell.written == kUnwritten) {
    return race(a, "read of a bulk write that nobody waited for", cell);
  }
  Actor const& writer = at(cell.writer);
  auto const w = static_cast<std::size_t>(writer.id);
  bool const own = writer.id == a.id;
  if (!own && a.clock_[w] < cell.written) {
    return race(a, "read without acquiring what the writer released", cell);
  }
  if (a.next_.proxy == Proxy::generic) return;
  if (cell.proxy == Proxy::generic && writer.proxy_fences_ <= cell.proxy_fences) {
    return race(a, "async read of a generic write that no proxy fence followed", cell);
  }
  if (!own && a.proxy_clock_[w] < cell.written) {
    return race(a, "async read without a proxy fence after acquire", cell);
  }
}

void Machine::do_read(Actor& a) {
  Cell& cell = cells_[a.next_.address.key()];
  if (!ignore_order_) judge_read(a, cell);
  a.result_ = own_value(a, a.next_.address.key());
  std::uint32_t const now = a.clock_[static_cast<std::size_t>(a.id)];
  auto const known = std::find_if(cell.readers.begin(), cell.readers.end(),
                                  [&](auto const& reader) { return reader.first == a.id; });
  if (known == cell.readers.end()) {
    cell.readers.emplace_back(a.id, now);
  } else {
    known->second = now;
  }
}

void Machine::judge_write(Actor const& a, Cell const& cell) {
  if (cell.writer >= 0 && cell.writer != a.id &&
      (cell.written == kUnwritten ||
       a.clock_[static_cast<std::size_t>(cell.writer)] < cell.written)) {
    race(a, "write over a write that need not have happened", cell);
  }
  for (auto const& [reader, clock] : cell.readers) {
    if (reader != a.id && a.clock_[static_cast<std::size_t>(reader)] < clock) {
      race(a, "write over what another may still read", cell);
    }
  }
  if (cell.copies > 0) race(a, "write over what a bulk store may still read", cell);
}

// What stands there for this actor: its own latest write, if that is on its way.
std::uint64_t Machine::own_value(Actor const& a, std::uint64_t key) {
  std::uint64_t value = cells_[key].value;
  for (Actor::Write const& w : a.buffer_) {
    if (w.key == key) value = w.value;
  }
  return value;
}

void Machine::do_write(Actor& a) {
  std::uint64_t const key = a.next_.address.key();
  Cell& cell = cells_[key];
  if (!ignore_order_) judge_write(a, cell);
  bool const bulk = a.next_.proxy == Proxy::async;
  cell.readers.clear();
  cell.writer = a.id;
  cell.proxy = a.next_.proxy;
  cell.written = bulk ? kUnwritten : a.clock_[static_cast<std::size_t>(a.id)];
  cell.proxy_fences = a.proxy_fences_;
  a.buffer_.push_back({key, a.next_.value, a.next_.proxy});
  if (bulk) a.bulk_.push_back(key);
  if (a.next_.kind != Kind::copy) return;
  std::uint64_t const from = a.next_.from.key();
  a.buffer_.back().from = from;
  a.reading_.push_back(from);
  ++cells_[from].copies;
}

void Machine::wait_read(Actor& a) {
  for (Actor::Write& w : a.buffer_) {
    if (w.from != Actor::kNowhere) w.value = own_value(a, w.from);
    w.from = Actor::kNowhere;
  }
  for (std::uint64_t const key : a.reading_) --cells_[key].copies;
  a.reading_.clear();
}

void Machine::wait_written(Actor& a) {
  wait_read(a);
  auto const bulk = [](Actor::Write const& w) { return w.proxy == Proxy::async; };
  for (Actor::Write const& w : a.buffer_) {
    if (bulk(w)) cells_[w.key].value = w.value;
  }
  std::erase_if(a.buffer_, bulk);
  for (std::uint64_t const key : a.bulk_) {
    Cell& cell = cells_[key];
    if (cell.writer != a.id || cell.written != kUnwritten) continue;
    cell.written = a.clock_[static_cast<std::size_t>(a.id)];
  }
  a.bulk_.clear();
}

void Machine::drain_generic(Actor& a) {
  auto const generic = [](Actor::Write const& w) { return w.proxy == Proxy::generic; };
  for (Actor::Write const& w : a.buffer_) {
    if (generic(w)) cells_[w.key].value = w.value;
  }
  std::erase_if(a.buffer_, generic);
}

bool Machine::drain(int actor, std::mt19937_64& rng) {
  Actor& a = at(actor);
  if (a.buffer_.empty()) return false;
  std::size_t const chosen = rng() % a.buffer_.size();
  // Writes of one cell keep their order.
  auto const first = std::find_if(a.buffer_.begin(), a.buffer_.end(), [&](Actor::Write const& w) {
    return w.key == a.buffer_[chosen].key;
  });
  cells_[first->key].value =
      first->from == Actor::kNowhere ? first->value : own_value(a, first->from);
  a.buffer_.erase(first);
  return true;
}

void Machine::do_release(Actor& a, Word& word) {
  drain_generic(a);
  if (a.next_.scope == Scope::sys) join(word.sys, a.clock_);
  if (word.rank != a.rank) word.local = {};
  word.rank = a.rank;
  join(word.local, a.clock_);
  ++a.clock_[static_cast<std::size_t>(a.id)];
}

void Machine::acquire(Actor& a, Word const& word) {
  if (a.next_.scope == Scope::sys) join(a.clock_, word.sys);
  if (word.rank == a.rank) join(a.clock_, word.local);
}

// The last one in takes all with it: a kernel's end makes everything visible to the next one.
void Machine::do_boundary(std::int32_t rank) {
  Clock all = {};
  auto const meets = [rank](Actor const& a) { return a.rank == rank && !a.outlives_kernels; };
  for (Actor const& a : actors_) {
    if (!meets(a)) continue;
    if (!a.at_boundary_) return;
    join(all, a.clock_);
  }
  for (Actor& a : actors_) {
    if (!meets(a)) continue;
    wait_written(a);
    drain_generic(a);
    join(all, a.clock_);
  }
  for (Actor& a : actors_) {
    if (!meets(a)) continue;
    a.clock_ = all;
    ++a.clock_[static_cast<std::size_t>(a.id)];
    ++a.proxy_fences_;
    a.proxy_clock_ = a.clock_;
    a.at_boundary_ = false;
  }
  for (Actor& a : actors_) {
    if (meets(a)) resume(a);
  }
}

std::string Machine::waiters() const {
  std::string text;
  for (Actor const& a : actors_) {
    if (a.done_ || a.outlives_kernels || (killed_ >> a.rank & 1u) != 0) continue;
    Operation const& o = a.next_;
    auto const found = words_.find(o.address.key());
    char const* const at = a.at_boundary_         ? "the end"
                           : o.kind == Kind::take ? "its start, to take SMs,"
                                                  : site_name(o.site);
    text += a.name + " waits at " + at + " for " + std::to_string(o.value) + ", sees " +
            std::to_string(found == words_.end() ? 0 : found->second.value) + "; ";
  }
  return text;
}

bool Machine::finished(std::int32_t rank) const {
  return std::all_of(actors_.begin(), actors_.end(), [rank](Actor const& a) {
    return a.rank != rank || a.done_ || a.outlives_kernels;
  });
}

std::vector<Site> Machine::waiting_sites(std::int32_t rank) const {
  std::vector<Site> sites;
  for (Actor const& a : actors_) {
    if (a.rank != rank || a.done_ || a.outlives_kernels || a.at_boundary_) continue;
    if ((killed_ >> a.rank & 1u) != 0) continue;
    if (a.next_.kind == Kind::wait && !satisfied(a.next_)) sites.push_back(a.next_.site);
  }
  return sites;
}

std::uint64_t Machine::fingerprint() const {
  std::uint64_t hash = 0;
  for (Actor const& a : actors_) hash = mix(hash, a.history_);
  return hash;
}

void run_random(Machine& machine, Temper temper, std::uint64_t seed, std::int64_t steps) {
  std::mt19937_64 rng(seed * 0x9e3779b97f4a7c15u + 17);
  std::uint64_t slow = 0;  // actors that hardly run for a while
  std::int64_t change = 0;
  while (machine.fault().empty() && !machine.finished() && machine.steps() < steps) {
    std::vector<int> const can = machine.runnable();
    std::vector<int> writers;
    for (int a = 0; a < machine.actors(); ++a) {
      if (machine.has_writes(a)) writers.push_back(a);
    }
    if (can.empty() && writers.empty()) return;
    std::uint64_t const drains = temper == Temper::late_writes ? 64 : 3;
    if (!writers.empty() && (can.empty() || rng() % drains == 0)) {
      machine.drain(writers[rng() % writers.size()], rng);
      continue;
    }
    if (machine.steps() >= change) {
      slow = temper == Temper::starve ? rng() & rng() : 0;
      if (temper == Temper::run_ahead) slow = rng();
      change = machine.steps() + 50 + static_cast<std::int64_t>(rng() % 400);
    }
    int chosen = can[rng() % can.size()];
    for (int attempt = 0; attempt < 20; ++attempt) {
      // run_ahead: whole ranks stand still
      int const bit = temper == Temper::run_ahead ? machine.rank_of(chosen) : chosen;
      if ((slow >> bit & 1u) == 0) break;
      chosen = can[rng() % can.size()];
    }
    machine.step(chosen);
  }
}

Exploration explore(std::function<std::unique_ptr<World>()> const& make, std::int64_t limit) {
  Exploration result;
  std::unordered_set<std::uint64_t> seen;
  std::vector<std::vector<std::uint8_t>> open = {{}};
  while (!open.empty()) {
    std::vector<std::uint8_t> path = std::move(open.back());
    open.pop_back();
    std::unique_ptr<World> const world = make();
    Machine* const machine = &world->machine();
    auto const settle_all = [&] {
      for (std::int64_t before = -1; before != machine->steps();) {
        before = machine->steps();
        for (int a = 0; a < machine->actors(); ++a) machine->settle(a);
      }
    };
    settle_all();
    for (std::uint8_t const actor : path) {
      machine->step(actor);
      settle_all();
    }
    // Down the first branch, leaving the others for later.
    while (seen.insert(machine->fingerprint()).second) {
      if (++result.states > limit) return result;  // incomplete
      std::vector<int> const can = machine->runnable();
      if (machine->fault().empty() && can.empty() && !machine->finished()) {
        machine->fault("deadlock: " + machine->waiters());
      }
      if (!machine->fault().empty()) {
        result.fault = machine->fault();
        return result;
      }
      if (can.empty()) break;
      for (std::size_t i = 1; i < can.size(); ++i) {
        open.push_back(path);
        open.back().push_back(static_cast<std::uint8_t>(can[i]));
      }
      path.push_back(static_cast<std::uint8_t>(can[0]));
      machine->step(can[0]);
      settle_all();
    }
  }
  result.complete = true;
  return result;
}

}  // namespace tessera::expert_parallel::model
