// SPDX-License-Identifier: Apache-2.0
#include "tests/emulator/sm100/tensor_memory.hpp"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <vector>

#include "tests/emulator/sm100/knowledge.hpp"
#include "tests/emulator/sm100/multiply.hpp"
#include "tests/emulator/state.hpp"

namespace tessera::emulator {
namespace {

TensorWatcher tensor;

int lane_of(Thread const& t) { return static_cast<int>(t.index % kWarp); }

std::string region(int lane, int lanes, int column, int columns) {
  return "lanes " + std::to_string(lane) + ".." + std::to_string(lane + lanes - 1) + ", columns " +
         std::to_string(column) + ".." + std::to_string(column + columns - 1);
}

// All lanes of the warp say the same.
void agree(std::uint64_t value, char const* what, int line) {
  std::uint64_t const* const all = exchange(value, {what, line});
  for (int lane = 0; lane < kWarp; ++lane) {
    if (all[lane] != value) fail(std::string(what) + ": lanes of a warp give different addresses");
  }
}

// Visits the units of a region, which has to be owned.
template <class F>
void visit_units(TensorCta& cta, char const* what, int lane, int lanes, int column, int columns,
                 F f) {
  if (column < 0 || column + columns > kColumns || lane < 0 || lane + lanes > kLanes) {
    fail(std::string(what) + ": " + region(lane, lanes, column, columns) +
         " are not in tensor memory");
  }
  for (int l = lane / kUnit; l <= (lane + lanes - 1) / kUnit; ++l) {
    for (int c = column / kUnit; c <= (column + columns - 1) / kUnit; ++c) {
      if (!cta.units[l][c].owned) {
        fail(std::string(what) + ": " + region(l * kUnit, kUnit, c * kUnit, kUnit) +
             " are not allocated");
      }
      f(cta.units[l][c], l, c);
    }
  }
}

void require_written(Unit const& unit, Clock const& known, std::string const& what) {
  if (unit.writer < 0) fail(what + ": nothing was written there");
  if (known[static_cast<std::size_t>(unit.writer)] < unit.written) {
    fail(what +
         ": what was written there last is not known to be complete; wait for its commit, or the "
         "barrier behind its wait::st, then fence::after");
  }
}
void require_loaded(Unit const& unit, Cta const& cta, Clock const& known, std::string const& what) {
  for (std::size_t warp = 0; warp < kMaxWarps; ++warp) {
    if (unit.loaded[warp] > known[TensorWatcher::clock_of(cta, warp) + 1]) {
      fail(what + ": a load of it by warp " + std::to_string(warp) +
           " is not known to be done; wait::ld, fence::before and an arrival there, a wait and "
           "fence::after here");
    }
  }
}

// The CTAs that an instruction of this thread works in.
std::vector<Cta*> group_of(int ctas) {
  std::vector<Cta*> all;
  Cta& own = *world.running->cta;
  if (ctas == 1) return {&own};
  for (int rank = 0; rank < ctas; ++rank)
    all.push_back(&cta_of_cluster(static_cast<unsigned>(rank)));
  return all;
}

WarpState& issue(int ctas, char const* what) {
  tensor.group(ctas);
  Thread& t = *world.running;
  WarpState& warp = tensor.own_warp();
  if (warp.issuing_lane < 0) warp.issuing_lane = lane_of(t);
  if (warp.issuing_lane != lane_of(t)) {
    fail(std::string(what) + ": several lanes of a warp issue; one does, under elect_one()");
  }
  if (ctas == 2 && TensorWatcher::rank_of(*t.cta) != 0) {
    fail(std::string(what) + ": CTA 1 of a pair issues; CTA 0 does for both");
  }
  return warp;
}
// As one of the things that a warp has issued, behind the others.
void do_in_order(WarpState& warp, std::function<void()> step) {
  warp.queue.push_back(std::move(step));
  world.later.push_back({world.running, Kind::tensor, [&warp] {
                           std::function<void()> const next = std::move(warp.queue.front());
                           warp.queue.pop_front();
                           next();
                         }});
}

int columns_of_d(int ctas, Instruction const& i) { return ctas == 2 && i.m == 128 ? i.n / 2 : i.n; }

std::string fault_of(Cta const& cta, char const* what) {
  return "CTA " + std::to_string(cta.index) + ": " + what;
}

void read_operands(Multiplied& m, std::vector<Cta*> const& group, MmaWords const& words,
                   std::uint64_t fence) {
  for (Cta* const cta : group) {
    if (cta->left == 0) {
      throw std::runtime_error("a multiplication reads the shared memory of a CTA that has ended");
    }
    int const rank = TensorWatcher::rank_of(*cta);
    std::string const wrong = read_share(
        m, cta->shared, words, static_cast<int>(group.size()), group.size() == 1 ? 0 : rank,
        kMaxShared, [=](void const* at) { return tensor.unfenced(at, 16, fence); });
    if (!wrong.empty()) throw std::runtime_error(fault_of(*cta, wrong.c_str()));
    if (m.instruction.kind == MmaKind::mxf8) {
      read_scales(m, tensor.of(*cta).cells, words, static_cast<int>(group.size()),
                  group.size() == 1 ? 0 : rank);
    }
  }
}

}  // namespace

void tensor_alloc(int ctas, std::uint32_t* to, std::uint32_t columns) {
  tensor.group(ctas);
  agree(columns, "tcgen05.alloc", __LINE__);
  Thread const& t = *world.running;
  TensorCta& own = tensor.of(*t.cta);
  if (lane_of(t) == 0) {
    if (columns < 32 || columns > kColumns || (columns & (columns - 1)) != 0) {
      fail("tcgen05.alloc of " + std::to_string(columns) +
           " columns, which is no power of two from 32 to 512");
    }
    if (own.relinquished) fail("tcgen05.alloc behind relinquish_alloc_permit");
    if (own.granted != 0 && columns > own.granted) {
      fail("tcgen05.alloc of more columns than the allocation before");
    }
    int const base = tensor.base(own.count++, columns);
    if (base < 0) {
      fail("tcgen05.alloc of " + std::to_string(columns) +
           " columns, which waits for ever: the CTA itself has those that are missing");
    }
    own.granted = columns;
    own.allocations[base] = static_cast<int>(columns);
    for (auto& row : own.units) {
      for (std::size_t u = 0; u < columns / kUnit; ++u) {
        row[static_cast<std::size_t>(base / kUnit) + u] = {.owned = true};
      }
    }
    for (auto& row : own.cells.bits) {
      std::fill_n(&row[base], columns, 0xffffffffu);
    }
    std::fill_n(&own.scales_copied[base], columns, false);
    *to = static_cast<std::uint32_t>(base);
    changed();
  }
  exchange(0, {"tcgen05.alloc", __LINE__});
}

void tensor_relinquish(int ctas) {
  tensor.group(ctas);
  exchange(0, {"tcgen05.relinquish_alloc_permit", __LINE__});
  tensor.of(*world.running->cta).relinquished = true;
}

void tensor_free(int ctas, std::uint32_t address, std::uint32_t columns) {
  tensor.group(ctas);
  agree(address, "tcgen05.dealloc", __LINE__);
  Thread const& t = *world.running;
  if (lane_of(t) == 0) {
    TensorCta& own = tensor.of(*t.cta);
    int const base = static_cast<int>(address);
    auto const found = own.allocations.find(base);
    if (found == own.allocations.end() || found->second != static_cast<int>(columns)) {
      fail("tcgen05.dealloc of " + std::to_string(columns) + " columns from " +
           std::to_string(address) + " on, which no alloc gave");
    }
    Clock const& known = tensor.own_warp().known;
    // In a pair the peer's accesses have to be over as well.
    for (int rank = 0; rank < ctas; ++rank) {
      Cta const& cta =
          ctas == 1 ? *t.cta : *world.ctas[t.cta->cluster_begin + static_cast<std::size_t>(rank)];
      for (auto& row : tensor.of(cta).units) {
        for (int c = base / kUnit; c < (base + found->second) / kUnit; ++c) {
          if (row[c].writer >= 0) require_written(row[c], known, "tcgen05.dealloc");
          require_loaded(row[c], cta, known, "tcgen05.dealloc");
          if (&cta == t.cta) row[c] = {};
        }
      }
    }
    own.allocations.erase(found);
  }
  exchange(0, {"tcgen05.dealloc", __LINE__});
}

void tensor_multiply(int ctas, MmaKind kind, MmaWords const& words, bool accumulates) {
  WarpState& warp = issue(ctas, "tcgen05.mma");
  Instruction instruction = {};
  try {
    instruction = decode_instruction(kind, words.instruction, ctas);
    decode_operand(words.a);
    decode_operand(words.b);
  } catch (std::runtime_error const& e) {
    fail(std::string("tcgen05.mma: ") + e.what());
  }
  if (words.d >> 16 != 0) fail("tcgen05.mma: D begins in another lane than 0");
  int const column = static_cast<int>(words.d), width = columns_of_d(ctas, instruction);
  std::size_t const clock = TensorWatcher::own_clock();
  auto const shape = static_cast<std::uint32_t>(kind) | static_cast<std::uint32_t>(column) << 1 |
                     static_cast<std::uint32_t>(instruction.m) << 11 |
                     static_cast<std::uint32_t>(instruction.n) << 20;
  std::vector<Cta*> const group = group_of(ctas);
  ++warp.issued;
  for (Cta* const cta : group) {
    TensorCta& there = tensor.of(*cta);
    if (kind == MmaKind::mxf8) {
      auto const scales = [&](std::uint32_t from, int columns) {
        int const first = static_cast<int>(from & 0xffff);
        if (from >> 16 != 0) fail("tcgen05.mma, scales: they begin in another lane than 0");
        if (first < column + width && column < first + columns) {
          fail("tcgen05.mma, scales in " + region(0, kLanes, first, columns) +
               ": D lies over them");
        }
        visit_units(there, "tcgen05.mma, scales", 0, kLanes, static_cast<int>(from & 0xffff),
                    columns, [&](Unit& unit, int, int) {
                      bool const in_order = unit.writer == static_cast<int>(clock);
                      if (!in_order) require_written(unit, warp.known, "tcgen05.mma, scales");
                    });
        for (int c = first; c < first + columns; ++c) {
          if (!there.scales_copied[c]) {
            fail("tcgen05.mma, scales in column " + std::to_string(c) +
                 ": no tcgen05.cp ahead of it has written them");
          }
          there.scales_read[c] = warp.issued;
        }
      };
      scales(words.a_scales, kScaleColumns);
      scales(words.b_scales, (instruction.n + kLanes - 1) / kLanes * kScaleColumns);
    }
    visit_units(there, "tcgen05.mma, D", 0, kLanes, column, width, [&](Unit& unit, int l, int c) {
      std::string const what = "tcgen05.mma, D in " + region(l * kUnit, kUnit, c * kUnit, kUnit) +
                               " of CTA " + std::to_string(cta->index);
      if (accumulates && unit.writer < 0) fail(what + ": adds to what nobody has written");
      require_loaded(unit, *cta, warp.known, what);
      bool const in_order = unit.writer == static_cast<int>(clock) && unit.shape == shape;
      if (unit.writer >= 0 && !in_order) require_written(unit, warp.known, what);
      unit.writer = static_cast<int>(clock);
      unit.written = warp.issued;
      unit.shape = shape;
    });
    std::fill_n(&there.scales_copied[column], width, false);
  }
  auto const m = std::make_shared<Multiplied>();
  m->instruction = instruction;
  std::uint64_t const fence = tensor.last_fence();
  do_in_order(warp, [=] { read_operands(*m, group, words, fence); });
  do_in_order(warp, [=] {
    for (Cta* const cta : group) {
      write_share(*m, tensor.of(*cta).cells, column, ctas,
                  ctas == 1 ? 0 : TensorWatcher::rank_of(*cta), accumulates);
    }
  });
}

void tensor_copy_scales(int ctas, std::uint32_t address, std::uint64_t atom) {
  WarpState& warp = issue(ctas, "tcgen05.cp");
  SharedOperand from = {};
  try {
    from = decode_operand(atom);
  } catch (std::runtime_error const& e) {
    fail(std::string("tcgen05.cp: ") + e.what());
  }
  if (from.swizzle != 0 || from.stride != 128) {
    fail("tcgen05.cp: an atom of scales has no swizzle, and 128 bytes from 8 rows to the next");
  }
  if (address >> 16 != 0) fail("tcgen05.cp: the scales begin in another lane than 0");
  if (from.address + 512 > kMaxShared) fail("tcgen05.cp: the atom ends behind shared memory");
  int const column = static_cast<int>(address & 0xffff);
  std::size_t const clock = TensorWatcher::own_clock();
  std::vector<Cta*> const group = group_of(ctas);
  ++warp.issued;
  for (Cta* const cta : group) {
    TensorCta& there = tensor.of(*cta);
    visit_units(there, "tcgen05.cp", 0, kLanes, column, kScaleColumns, [&](Unit& unit, int, int) {
      bool const in_order = unit.writer == static_cast<int>(clock);
      if (unit.writer >= 0 && !in_order) require_written(unit, warp.known, "tcgen05.cp");
      unit.writer = static_cast<int>(clock);
      unit.written = warp.issued;
    });
    for (int c = column; c < column + kScaleColumns; ++c) {
      there.scales_copied[c] = true;
      if (there.scales_read[c] > warp.known[clock]) {
        fail(
            "tcgen05.cp: over scales that a multiplication may still read; give each stage columns "
            "of its own");
      }
    }
  }
  std::uint64_t const fence = tensor.last_fence();
  do_in_order(warp, [=] {
    for (Cta* const cta : group) {
      if (cta->left == 0) throw std::runtime_error("tcgen05.cp reads a CTA that has ended");
      std::string const wrong = tensor.unfenced(cta->shared + from.address, 512, fence);
      if (!wrong.empty()) throw std::runtime_error(fault_of(*cta, wrong.c_str()));
      copy_atom(tensor.of(*cta).cells, column, cta->shared + from.address);
    }
  });
}

void tensor_commit(int ctas, Barrier* barrier) {
  WarpState& warp = issue(ctas, "tcgen05.commit");
  Clock clock = warp.published;
  merge(clock, warp.known);
  clock[TensorWatcher::own_clock()] = warp.issued;
  for (Cta* const cta : group_of(ctas)) {
    Barrier* const committed = there(*cta, barrier);
    do_in_order(warp, [=] {
      if (cta->left == 0)
        throw std::runtime_error("tcgen05.commit arrives in a CTA that has ended");
      tensor.carry(committed, clock);
      arrive(*cta, committed, 0);
    });
  }
}

namespace {

void load(std::uint32_t (&r)[32], std::uint32_t address, bool fragments) {
  char const* const what = "tcgen05.ld";
  std::fill_n(r, 32, 0xffffffffu);
  agree(address, what, __LINE__);
  Thread const& t = *world.running;
  WarpState& warp = tensor.own_warp();
  int const lane = static_cast<int>(address >> 16), column = static_cast<int>(address & 0xffff);
  int const first = static_cast<int>(TensorWatcher::warp_of(t) % 4) * kUnit;
  if (lane != first && !(fragments && lane == first + 16)) {
    fail("tcgen05.ld from lane " + std::to_string(lane) + " by a warp that reaches lanes " +
         std::to_string(first) + ".." + std::to_string(first + kUnit - 1) + " alone");
  }
  warp.loads[lane_of(t)].push_back({r, fragments, lane, column});
  if (lane_of(t) != 0) return;
  ++warp.accesses;
  int const columns = fragments ? 64 : 32;
  visit_units(tensor.of(*t.cta), what, lane, fragments ? 16 : 32, column, columns,
              [&](Unit& unit, int l, int c) {
                require_written(unit, warp.known,
                                "tcgen05.ld of " + region(l * kUnit, kUnit, c * kUnit, kUnit));
                unit.loaded[TensorWatcher::warp_of(t)] = warp.accesses;
              });
}

}  // namespace

void tensor_load_rows(std::uint32_t (&r)[32], std::uint32_t address) { load(r, address, false); }
void tensor_load_fragments(std::uint32_t (&r)[32], std::uint32_t address) {
  load(r, address, true);
}

void tensor_wait_loads() {
  exchange(0, {"tcgen05.wait::ld", __LINE__});
  Thread const& t = *world.running;
  TensorCta const& own = tensor.of(*t.cta);
  WarpState& warp = tensor.own_warp();
  int const lane = lane_of(t);
  for (PendingLoad const& one : warp.loads[lane]) {
    for (int i = 0; i < 32; ++i) {
      one.r[i] = one.fragments ? own.cells.bits[one.lane + lane / 4 + i / 2 % 2 * 8]
                                               [one.column + i / 4 * 8 + lane % 4 * 2 + i % 2]
                               : own.cells.bits[one.lane + lane][one.column + i];
    }
  }
  warp.loads[lane].clear();
  exchange(0, {"tcgen05.wait::ld", __LINE__});  // it is over for all lanes at once
  warp.known[TensorWatcher::own_clock() + 1] = warp.accesses;
}

void tensor_store_rows(std::uint32_t address, std::uint32_t const (&r)[32]) {
  char const* const what = "tcgen05.st";
  agree(address, what, __LINE__);
  Thread const& t = *world.running;
  WarpState& warp = tensor.own_warp();
  int const lane = static_cast<int>(address >> 16), column = static_cast<int>(address & 0xffff);
  if (lane != static_cast<int>(TensorWatcher::warp_of(t) % 4) * kUnit) {
    fail("tcgen05.st to lane " + std::to_string(lane) + ", which this warp does not reach");
  }
  PendingStore one{lane, column, {}};
  std::copy_n(r, 32, one.values.begin());
  warp.stores[lane_of(t)].push_back(one);
  if (lane_of(t) != 0) return;
  ++warp.accesses;
  visit_units(tensor.of(*t.cta), what, lane, kUnit, column, kUnit, [&](Unit& unit, int, int) {
    if (unit.writer >= 0) require_written(unit, warp.known, what);
    require_loaded(unit, *t.cta, warp.known, what);
    unit.writer = static_cast<int>(TensorWatcher::own_clock()) + 1;
    unit.written = warp.accesses;
    unit.shape = 0;
  });
}

void tensor_wait_stores() {
  exchange(0, {"tcgen05.wait::st", __LINE__});
  Thread const& t = *world.running;
  TensorCta& own = tensor.of(*t.cta);
  WarpState& warp = tensor.own_warp();
  int const lane = lane_of(t);
  for (PendingStore const& one : warp.stores[lane]) {
    std::copy_n(one.values.begin(), 32, &own.cells.bits[one.lane + lane][one.column]);
  }
  warp.stores[lane].clear();
  exchange(0, {"tcgen05.wait::st", __LINE__});
  warp.known[TensorWatcher::own_clock() + 1] = warp.accesses;
}

// A load or store that nobody waited for may be in flight behind the fence, too; no kernel here wants that.
void tensor_fence_before() {
  WarpState& warp = tensor.own_warp();
  int const lane = lane_of(*world.running);
  if (!warp.loads[lane].empty()) fail("tcgen05.fence::before: loads without a wait::ld");
  if (!warp.stores[lane].empty()) fail("tcgen05.fence::before: stores without a wait::st");
  merge(warp.published, warp.known);
}
void tensor_relay(unsigned rank, Barrier* barrier) {
  tensor.relays();
  arrive_in(rank, barrier);
}
void tensor_fence_after() {
  WarpState& warp = tensor.own_warp();
  merge(warp.known, warp.pending);
}

}  // namespace tessera::emulator
