// SPDX-License-Identifier: Apache-2.0
// What goes on beside the threads: copies, and multiplications.
#include <algorithm>

#include "core/fp8.hpp"
#include "tests/emulator/e4m3_sum.hpp"
#include "tests/emulator/state.hpp"

namespace tessera::emulator {
namespace {

void do_later(Thread* thread, Kind kind, std::function<void()> work) {
  world.later.push_back({thread, kind, std::move(work)});
}

float widen(std::uint16_t bits) {
  std::uint32_t const wide = std::uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Element (row, k) of an operand with the 128-byte swizzle. K-major: rows of 128 bytes, eight of them to a group.
// Rows-major: boxes of 64 rows, in which 128 bytes are one k of all of them, eight k to a group.
float element(unsigned char const* shared, std::uint64_t descriptor, bool rows_major, int row,
              int k, bool e4m3) {
  auto const field = [&](int at) {
    return static_cast<std::uint32_t>(descriptor >> at & 0x3fff) << 4;
  };
  std::uint32_t const group = field(32), box = field(16);
  auto const r = static_cast<std::uint32_t>(row), column = static_cast<std::uint32_t>(k);
  std::uint32_t at =
      field(0) + (rows_major ? r / 64 * box + column / 8 * group + column % 8 * 128 + r % 64 * 2
                             : r / 8 * group + r % 8 * 128 + column * (e4m3 ? 1 : 2));
  at ^= (at >> 7 & 7) << 4;
  if (e4m3) return core::to_fp32(core::E4m3{shared[at]});
  std::uint16_t bits;
  std::memcpy(&bits, shared + at, 2);
  return widen(bits);
}

Operands& operands_of(Thread& t, std::uint64_t number) {
  Warpgroup& group = t.cta->warpgroups[t.index / kWarpgroup];
  return *group.operands[static_cast<std::size_t>(number - group.begin)];
}

// Operands::columns holds the columns of a lane's sums side by side. This is where a column stands there.
int place_of(int column, int columns) {
  return column / 2 % 4 * (columns / 4) + column / 8 * 2 + column % 2;
}

constexpr int kTogether = 16;  // columns of a lane whose sums are in registers at once

// sums += row . column for each of some columns, by ascending k.
void add_bf16_products(Operands const& o, float const (&row)[32], int place, float* sums) {
  float held[kTogether];
  std::copy_n(sums, kTogether, held);
  for (int k = 0; k < Operands::kBf16; ++k) {
    for (int c = 0; c < kTogether; ++c) held[c] += row[k] * o.columns[k][place + c];
  }
  std::copy_n(held, kTogether, sums);
}

void add_e4m3_products_of(Operands const& o, float const (&row)[32], int place, float* sums) {
  for (int c = 0; c < kTogether; ++c) {
    float products[kE4m3Products];
    for (int k = 0; k < kE4m3Products; ++k) products[k] = row[k] * o.columns[k][place + c];
    sums[c] = add_e4m3_products(sums[c], products);
  }
}

void multiply(Thread& t, Multiplication const& m) {
  Operands& o = operands_of(t, m.number);
  int const columns = m.second != nullptr ? 256 : 128;
  if (!o.read) {
    for (int k = 0; k < o.k(); ++k) {
      for (int row = 0; row < 64 && !o.a_in_registers; ++row) {
        o.rows[row][k] = element(t.cta->shared, o.a, o.a_rows_major, row, k, o.e4m3);
      }
      for (int c = 0; c < columns; ++c) {
        o.columns[k][place_of(c, columns)] =
            element(t.cta->shared, o.b, o.b_rows_major, c, k, o.e4m3);
      }
    }
    o.read = true;
  }
  int const lane = static_cast<int>(t.index) % kWarp;
  int const warp = static_cast<int>(t.index) % kWarpgroup / kWarp;
  // A lane's sums come in fours: two neighbouring columns of a row, then these columns of the row eight below.
  for (int half = 0; half < 2; ++half) {
    auto const& row = o.rows[16 * warp + lane / 4 + 8 * half];
    for (int first = 0; first < columns / 4; first += kTogether) {
      float* const d = 2 * first < 64 ? m.first + 2 * first : m.second + (2 * first - 64);
      float sums[kTogether] = {};
      for (int c = 0; c < kTogether && m.adds; ++c) sums[c] = d[c / 2 * 4 + 2 * half + c % 2];
      int const place = lane % 4 * (columns / 4) + first;
      (o.e4m3 ? add_e4m3_products_of : add_bf16_products)(o, row, place, sums);
      for (int c = 0; c < kTogether; ++c) d[c / 2 * 4 + 2 * half + c % 2] = sums[c];
    }
  }
  Warpgroup& group = t.cta->warpgroups[t.index / kWarpgroup];
  --o.left;
  while (!group.operands.empty() && group.operands.front()->left == 0) {
    group.operands.pop_front();
    ++group.begin;
  }
}

}  // namespace

void load_later_in(unsigned rank, Barrier* barrier, std::uint32_t bytes,
                   std::function<void()> copy) {
  Cta& cta = cta_of_cluster(rank);
  Barrier* const full = there(cta, barrier);
  do_later(world.running, Kind::load, [=, &cta] {
    copy();
    land(cta, full, bytes);
  });
}
void load_later(Barrier* barrier, std::uint32_t bytes, std::function<void()> copy) {
  load_later_in(cluster_rank(), barrier, bytes, std::move(copy));
}

void store_later(std::function<void()> read, std::function<void()> write) {
  Thread* const t = world.running;
  t->reads.add();
  t->writes.add();
  std::uint64_t const reads = t->reads.number(), writes = t->writes.number();
  do_later(t, Kind::read, [=] {
    read();
    t->reads.done(reads);
    wake(*t->cta, t);
    do_later(t, Kind::write, [=] {
      write();
      t->writes.done(writes);
      wake(*t->cta, t);
    });
  });
}
void commit_stores() {
  world.running->reads.commit();
  world.running->writes.commit();
}
void wait_stores(int pending, bool reading_only) {
  Thread* const t = world.running;
  sleep_until(
      t, [=] { return (reading_only ? t->reads : t->writes).all_but(pending); },
      reading_only ? "its stores to be read" : "its stores");
}

void copy_later(std::function<void()> copy) {
  Thread* const t = world.running;
  t->copies.add();
  std::uint64_t const group = t->copies.number();
  auto const land = [=] {
    copy();
    t->copies.done(group);
    wake(*t->cta, t);
  };
  do_later(t, Kind::copy, land);
}
// Behind those that are under way now; later ones may land first.
void arrive_behind_copies(Barrier* barrier) {
  Thread* const t = world.running;
  auto const left = std::make_shared<int>(0);
  for (Later& one : world.later) {
    if (one.thread != t || one.kind != Kind::copy) continue;
    ++*left;
    one.work = [work = std::move(one.work), left, barrier, t] {
      work();
      if (--*left == 0) arrive(*t->cta, barrier, 0);
    };
  }
  if (*left == 0) arrive(barrier, 0);
}
void commit_copies() { world.running->copies.commit(); }
void wait_copies(int pending) {
  Thread* const t = world.running;
  sleep_until(t, [=] { return t->copies.all_but(pending); }, "its copies");
}

namespace {

// Of this thread's next multiplication, made by the first of its warpgroup.
Operands& next_operands(float* first, float* second, std::uint64_t a, std::uint64_t b, bool adds) {
  exchange(0, {"a multiplication", __LINE__});
  Thread& t = *world.running;
  Warpgroup& group = t.cta->warpgroups[t.index / kWarpgroup];
  std::uint64_t const number = t.multiplications++;
  if (number == group.begin + group.operands.size()) {
    group.operands.push_back(std::make_unique<Operands>());
    group.operands.back()->a = a;
    group.operands.back()->b = b;
  }
  Operands& o = operands_of(t, number);
  if (o.a != a || o.b != b) fail("warps of a warpgroup multiply different operands");
  t.open.push_back({first, second, number, adds});
  return o;
}

}  // namespace

void multiply_later(float* first, float* second, std::uint64_t a, std::uint64_t b,
                    bool a_rows_major, bool b_rows_major, bool adds) {
  Operands& o = next_operands(first, second, a, b, adds);
  o.a_rows_major = a_rows_major;
  o.b_rows_major = b_rows_major;
}
void multiply_e4m3_later(float* first, float* second, std::uint64_t a, std::uint64_t b, bool adds) {
  Operands& o = next_operands(first, second, a, b, adds);
  o.a_rows_major = o.b_rows_major = false;
  o.e4m3 = true;
}
// a[0], a[2]: row lane/4, k = 2 (lane%4) + {0, 1} and 8 more; a[1], a[3]: of the row 8 further on.
void multiply_later(float* first, float* second, std::uint32_t const (&a)[4], std::uint64_t b) {
  Operands& o = next_operands(first, second, 0, b, true);
  o.a_in_registers = o.b_rows_major = true;
  int const thread = static_cast<int>(world.running->index) % kWarpgroup, lane = thread % kWarp;
  for (int i = 0; i < 4; ++i) {
    float* const row = o.rows[thread / kWarp * 16 + lane / 4 + i % 2 * 8];
    int const k = 2 * (lane % 4) + i / 2 * 8;
    row[k] = widen(static_cast<std::uint16_t>(a[i]));
    row[k + 1] = widen(static_cast<std::uint16_t>(a[i] >> 16));
  }
}
void commit_multiplications() {
  Thread& t = *world.running;
  t.groups.push_back(std::move(t.open));
  t.open.clear();
}
void wait_multiplications(int pending) {
  exchange(0, {"a wait for multiplications", __LINE__});
  Thread& t = *world.running;
  while (t.groups.size() > static_cast<std::size_t>(pending)) {
    for (Multiplication const& m : t.groups.front()) multiply(t, m);
    t.groups.pop_front();
  }
}

}  // namespace tessera::emulator
