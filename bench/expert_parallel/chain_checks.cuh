// SPDX-License-Identifier: Apache-2.0
// What has to hold before anything is timed: equal bits with the layer that has all experts on one GPU, whatever the
// routing and whatever comes first, and a report where a rank stalls or dies.
#pragma once

#include <algorithm>
#include <chrono>
#include <csignal>

#include "ranks.cuh"

namespace tessera::bench {

struct CheckOptions : RankOptions {
  bool unfused = true, fused = true;  // which ways are checked
};

// Passes of different patterns and sizes on the same buffers. Slots are poisoned before each pass: a row that is
// dropped leaves NaN in o.
inline int check_small(CheckOptions const& options) {
  int failures = 0;
  struct Small {
    int tokens, hidden, intermediate, local_experts, top_k;
    ActivationKind activation;
    Transfer transfer = Transfer::direct;
  };
  using enum ActivationKind;
  using enum Transfer;
  for (Small const& c : {Small{40, 256, 128, 4, 2, swiglu},
                         {300, 512, 256, 8, 4, gelu},
                         {300, 512, 256, 8, 4, swiglu, once},
                         {300, 512, 256, 8, 4, swiglu, partial_combine},
                         {7, 64, 64, 1, 1, swiglu},
                         {90, 128, 64, 2, 4, swiglu},
                         {90, 128, 64, 2, 4, swiglu, once},
                         {600, 512, 256, 4, 1, swiglu},
                         {1000, 1152, 192, 16, 8, geglu},
                         {1000, 1152, 192, 16, 8, geglu, once},
                         {1000, 1152, 192, 16, 8, geglu, partial_combine},
                         {600, 328, 192, 16, 16, geglu, partial_combine},
                         {300, 520, 200, 8, 4, clamped_swiglu},
                         {300, 520, 200, 8, 4, clamped_swiglu, once},
                         {300, 520, 200, 8, 4, clamped_swiglu, partial_combine},
                         {129, 2048, 320, 3, 3, relu2},
                         {129, 7168, 320, 3, 3, relu2, once},
                         {129, 7168, 320, 3, 3, relu2, partial_combine}}) {
    ExchangeShape const shape = {.ranks = options.ranks(),
                                 .max_tokens = c.tokens,
                                 .hidden = c.hidden,
                                 .intermediate = c.intermediate,
                                 .experts = c.local_experts * options.ranks(),
                                 .max_top_k = std::min(c.top_k, c.local_experts * options.ranks()),
                                 .transfer = c.transfer,
                                 .gated = Activation{.kind = c.activation}.gated()};
    // Unfused, every other one with tokens that come once; fused; fused from the caller's x.
    constexpr int kPasses = 3 * std::size(kPatterns);
    auto const all = on_ranks(
        options, shape, c.activation, [&](int rank, Rank& r, Talk& talk, Context const& context) {
          bool all_right = true;
          for (uint64_t pass = 0; pass < kPasses; ++pass) {
            Pattern const pattern = kPatterns[pass / 3];
            bool const fused = options.fused && (pass % 3 != 0 || !options.unfused);
            X const from = pass % 3 == 2 ? X::by_kernel : X::in_window;
            r.set_pass(draw(shape, pattern, rank, pass), pass);
            r.compute_wanted(context);
            r.poison();
            if (fused && from == X::by_kernel) r.poison_x();
            talk.meet();
            if (fused) {
              r.launch_fused(int(pass / 3) - 1, from);
            } else {
              r.launch_chain([](Part) {}, pass / 3 % 2 == 1);
            }
            r.stream().synchronize();
            r.check_fault();
            if (!r.is_right(fused)) {
              all_right = false;
              std::printf("pass %d, %s, %s\n", int(pass), name(pattern),
                          fused ? "fused" : "unfused");
            }
            talk.meet();
          }
          return all_right;
        });
    bool const ok = all_of(all);
    std::printf("%s (T %d, d %d, n %d, E %d, K %d) %s, %s, %d passes:", ok ? "ok " : "BAD",
                c.tokens, c.hidden, c.intermediate, shape.experts, shape.max_top_k,
                transfer_name(c.transfer), options.text().c_str(), kPasses);
    for (Pattern const pattern : kPatterns) std::printf(" %s", name(pattern));
    std::printf("\n");
    std::fflush(stdout);
    failures += ok ? 0 : 1;
  }
  return failures ? 1 : 0;
}

// Equal bits from every one of many passes, whatever comes first: every wait in the kernel is followed by a pause
// of random length, and ranks launch at random times.
inline int check_repeats(CheckOptions const& options, Transfer transfer) {
  constexpr int kRepeats = 1000;
  ExchangeShape const shape = {.ranks = options.ranks(),
                               .max_tokens = 300,
                               .hidden = 512,
                               .intermediate = 256,
                               .experts = 8 * options.ranks(),
                               .max_top_k = 4,
                               .transfer = transfer};
  bool const ok =
      all_of(on_ranks(options, shape, ActivationKind::swiglu,
                      [&](int rank, Rank& r, Talk& talk, Context const& context) {
                        r.set_pass(draw(shape, Pattern::random, rank, 1), 1);
                        r.compute_wanted(context);
                        r.set_jitter(20000);
                        std::mt19937_64 rng{uint64_t(rank)};
                        int wrong = 0;
                        for (int pass = 0; pass < kRepeats; ++pass) {
                          X const from = pass < kRepeats / 2 ? X::in_window : X::by_kernel;
                          if (pass % 10 == 0) {
                            r.poison();
                            if (from == X::by_kernel) r.poison_x();
                            talk.meet();
                          }
                          std::this_thread::sleep_for(std::chrono::microseconds(rng() % 200));
                          r.launch_fused(pass % 5, from);
                          r.stream().synchronize();
                          r.check_fault();
                          wrong += r.is_right(true) ? 0 : 1;
                        }
                        talk.meet();
                        return wrong == 0;
                      }));
  std::printf("%s %d passes with random delays, rows %s, %s\n", ok ? "ok " : "BAD", kRepeats,
              transfer_name(transfer), options.text().c_str());
  return ok ? 0 : 1;
}

inline bool says(std::string const& text, std::string const& words) {
  return text.find(words) != std::string::npos;
}

// The last rank comes too late: the others give up after their limit and say for whom they waited, or who had given up
// before them; the last one then leaves at once.
inline int check_stalled(CheckOptions const& options) {
  if (options.ranks() < 2) return 0;
  int const last = options.ranks() - 1;
  ExchangeShape const shape = {.ranks = options.ranks(),
                               .max_tokens = 64,
                               .hidden = 256,
                               .intermediate = 128,
                               .experts = 4 * options.ranks(),
                               .max_top_k = 2};
  bool const ok = all_of(on_ranks(
      options, shape, ActivationKind::swiglu, [&](int rank, Rank& r, Talk& talk, Context const&) {
        r.set_limit(0.2);
        r.set_pass(draw(shape, Pattern::random, rank, 1), 1);
        talk.meet();
        for (bool const late : {false, true}) {
          if (late == (rank == last)) {
            r.launch_fused(-1);
            r.stream().synchronize();
            std::snprintf(talk.text[rank], sizeof talk.text[rank], "%s", r.fault().text());
          }
          talk.meet();
        }
        if (rank != 0) return true;
        std::string const word = "the word of rank " + std::to_string(last) + " is 0, expected 1";
        int waited = 0, followed = 0;
        for (int i = 0; i <= last; ++i) {
          std::string const text = talk.text[i];
          std::printf("  %s\n", text.c_str());
          bool const own = i < last && says(text, "at counted in pass 1") && says(text, word);
          waited += own ? 1 : 0;
          followed += !own && says(text, "had given up") ? 1 : 0;
        }
        return waited > 0 && waited + followed == talk.ranks;
      }));
  std::printf("%s a stalled rank\n", ok ? "ok " : "BAD");
  return ok ? 0 : 1;
}

// The process of the last rank is killed in the middle of its passes: the others report for whom they waited, or who
// had given up before them, and every pass that they ended before was right.
inline int check_killed(CheckOptions const& options) {
  if (options.ranks() < 2 || !options.processes) return 0;
  constexpr double kLimit = 0.5;  // seconds, of a wait
  constexpr int kMaxPasses = 200000;
  int const last = options.ranks() - 1;
  ExchangeShape const shape = {.ranks = options.ranks(),
                               .max_tokens = 300,
                               .hidden = 512,
                               .intermediate = 256,
                               .experts = 8 * options.ranks(),
                               .max_top_k = 4};
  auto ok = on_ranks(
      options, shape, ActivationKind::swiglu,
      [&](int rank, Rank& r, Talk& talk, Context const& context) -> bool {
        r.set_limit(kLimit);
        r.set_pass(draw(shape, Pattern::random, rank, 1), 1);
        r.compute_wanted(context);
        talk.meet();
        if (rank == last) {
          std::thread([] {
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
            raise(SIGKILL);
          }).detach();
        }
        int passes = 0, wrong = 0;
        while (passes < kMaxPasses) {
          r.launch_fused(-1);
          cudaError_t const error = cudaDeviceSynchronize();
          if (!r.fault().ok() || error != cudaSuccess) break;
          wrong += ++passes % 100 == 0 && !r.is_right(true) ? 1 : 0;
        }
        std::string const text = r.fault().text();
        std::printf("  after %d passes, %d wrong: %s\n", passes, wrong, text.c_str());
        std::fflush(stdout);
        bool const reported = says(text, "the word of rank " + std::to_string(last) + " is") ||
                              says(text, "had given up");
        _exit(reported && wrong == 0 && passes > 0 ? 0 : 1);  // nobody is left to meet
      });
  bool const died = ok.back() == 0;
  ok.pop_back();
  std::printf("%s a killed rank\n", died && all_of(ok) ? "ok " : "BAD");
  return died && all_of(ok) ? 0 : 1;
}

}  // namespace tessera::bench
