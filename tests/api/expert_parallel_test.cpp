// SPDX-License-Identifier: Apache-2.0
// Experts over several GPUs, as far as a machine without GPUs sees them: sizes, rules, and who says what is missing.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <string>

#include "tessera/tessera.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

ExpertParallelDesc good() {
  ExpertParallelDesc desc;
  desc.ranks = 4;
  desc.max_tokens = 100;
  desc.hidden = 256;
  desc.intermediate = 128;
  desc.experts = 16;
  desc.top_k = 4;
  return desc;
}

TEST(ExpertParallel, AWindowHoldsRowsListsAndSlots) {
  ExpertParallelDesc desc = good();
  auto const bytes = ExpertParallel::window_bytes(desc);
  ASSERT_TRUE(bytes.ok()) << bytes.status().text();
  std::size_t const x = 2 * 100 * 256;
  EXPECT_GE(bytes.value(), x + 4 * x);  // x, and a slot per choice
  EXPECT_LE(bytes.value(), x + 4 * x + (std::size_t{1} << 17));
  for (std::int32_t rank = 0; rank < 4; ++rank) {  // equal on all ranks
    desc.rank = rank;
    EXPECT_EQ(ExpertParallel::window_bytes(desc).value(), bytes.value());
  }
}

TEST(ExpertParallel, RulesNameFieldAndValue) {
  struct Bad {
    char const* text;
    void (*spoil)(ExpertParallelDesc&);
  };
  for (Bad const& bad : {
           Bad{"ranks=9: 1 to 8", [](ExpertParallelDesc& d) { d.ranks = 9; }},
           Bad{"rank=4", [](ExpertParallelDesc& d) { d.rank = 4; }},
           Bad{"max_tokens=0", [](ExpertParallelDesc& d) { d.max_tokens = 0; }},
           Bad{"hidden=250", [](ExpertParallelDesc& d) { d.hidden = 250; }},
           Bad{"intermediate=0", [](ExpertParallelDesc& d) { d.intermediate = 0; }},
           Bad{"experts=18", [](ExpertParallelDesc& d) { d.experts = 18; }},
           Bad{"top_k=17", [](ExpertParallelDesc& d) { d.top_k = 17; }},
           Bad{"time_limit=0", [](ExpertParallelDesc& d) { d.time_limit = 0; }},
           Bad{"sms=1: 0 for all, or at least 2", [](ExpertParallelDesc& d) { d.sms = 1; }},
           Bad{"sms=-2", [](ExpertParallelDesc& d) { d.sms = -2; }},
           Bad{"activation=99",
               [](ExpertParallelDesc& d) { d.activation.kind = static_cast<ActivationKind>(99); }},
           Bad{"limit=-1",
               [](ExpertParallelDesc& d) {
                 d.activation = {.kind = ActivationKind::clamped_swiglu, .limit = -1};
               }},
           Bad{"more than 2^31-1",
               [](ExpertParallelDesc& d) {
                 d.max_tokens = 1 << 24;
                 d.experts = 512;
                 d.top_k = 32;
                 d.ranks = 8;
               }},
           Bad{"max_tokens=8388608: at most 4194304 where top_k=32",
               [](ExpertParallelDesc& d) {
                 d.max_tokens = 1 << 23;
                 d.experts = 64;
                 d.top_k = 32;
                 d.ranks = 2;
               }},
       }) {
    ExpertParallelDesc desc = good();
    bad.spoil(desc);
    auto const bytes = ExpertParallel::window_bytes(desc);
    ASSERT_FALSE(bytes.ok()) << bad.text;
    EXPECT_EQ(bytes.status().code(), StatusCode::invalid_argument);
    EXPECT_NE(std::string(bytes.status().text()).find(bad.text), std::string::npos)
        << bytes.status().text();
  }
}

// A word for every token of every owner, where the link decides alone.
TEST(ExpertParallel, PartialCombineNeedsWords) {
  auto const bytes = [](std::int32_t ranks, bool combined) {
    return ExpertParallel::window_bytes({.ranks = ranks,
                                         .max_tokens = 8192,
                                         .hidden = 2048,
                                         .intermediate = 768,
                                         .experts = 128,
                                         .top_k = 8,
                                         .partial_combine = combined})
        .value();
  };
  EXPECT_EQ(bytes(4, true) - bytes(4, false), std::size_t{4} * 4 * 8192);
  EXPECT_EQ(bytes(2, true), bytes(2, false));
}

// Until 1.0 callers may write the old name, in C++ and in C.
TEST(ExpertParallel, PartialCombineHasItsOldName) {
  ExpertParallelDesc desc = {.ranks = 4,
                             .max_tokens = 8192,
                             .hidden = 2048,
                             .intermediate = 768,
                             .experts = 128,
                             .top_k = 8};
  std::size_t const plain = ExpertParallel::window_bytes(desc).value();
  desc.partial_combine = true;
  std::size_t const combined = ExpertParallel::window_bytes(desc).value();
  desc.partial_combine = false;
  desc.sums_on_owners = true;
  EXPECT_GT(combined, plain);
  EXPECT_EQ(ExpertParallel::window_bytes(desc).value(), combined);

  tessera_expert_parallel_desc c_desc = {};
  c_desc.size = sizeof c_desc;
  c_desc.ranks = 4;
  c_desc.max_tokens = 8192;
  c_desc.hidden = 2048;
  c_desc.intermediate = 768;
  c_desc.experts = 128;
  c_desc.top_k = 8;
  c_desc.sums_on_owners = 1;
  size_t bytes = 0;
  ASSERT_EQ(tessera_expert_parallel_window(&c_desc, &bytes), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(bytes, combined);
}

// A second x, and a float per choice.
TEST(ExpertParallel, TrainingNeedsALargerWindow) {
  ExpertParallelDesc desc = good();
  std::size_t const without = ExpertParallel::window_bytes(desc).value();
  desc.training = true;
  std::size_t const more = ExpertParallel::window_bytes(desc).value() - without;
  EXPECT_GE(more, std::size_t{2} * 100 * 256 + 4 * 100 * 4);
  EXPECT_LE(more, std::size_t{2} * 100 * 256 + 4 * 100 * 4 + 2 * 4096);
}

TEST(ExpertParallel, AContextOnTheCpuIsRefused) {
  auto const context = Context::create();
  ASSERT_TRUE(context.ok());
  void* windows[4] = {};
  auto const refused = [](Status const& status) {
    EXPECT_EQ(status.code(), StatusCode::environment) << status.text();
    EXPECT_NE(std::string(status.text()).find("create it on cuda:N"), std::string::npos)
        << status.text();
  };
  refused(ExpertParallel::workspace_bytes(context.value(), good()).status());
  refused(ExpertParallel::create(context.value(), good(), windows, {}).status());
  refused(PeerWindow::open(context.value(), 0, 1, {}, 1).status());
}

TEST(PeerWindow, SaysWhatIsMissing) {
  ASSERT_EQ(unsetenv("NCCL_NVLS_ENABLE"), 0);
  auto const with_multicast = PeerWindow::make_id();
  ASSERT_FALSE(with_multicast.ok());
  EXPECT_EQ(with_multicast.status().code(), StatusCode::environment);
  EXPECT_NE(std::string(with_multicast.status().text()).find("multicast must be off"),
            std::string::npos);

  ASSERT_EQ(setenv("NCCL_NVLS_ENABLE", "0", 1), 0);
  auto const without_nccl = PeerWindow::make_id("/nowhere/libnccl.so.2");
  ASSERT_FALSE(without_nccl.ok());
  EXPECT_EQ(without_nccl.status().code(), StatusCode::environment);
  EXPECT_NE(std::string(without_nccl.status().text()).find("install NCCL 2.28"), std::string::npos)
      << without_nccl.status().text();
}

TEST(PeerWindow, OfOneProcessAskForGpus) {
  Device const on_cpu[] = {{DeviceKind::cuda, 0}, {}};
  auto const cpu = PeerWindow::open_all(on_cpu, 1);
  ASSERT_FALSE(cpu.ok());
  EXPECT_EQ(cpu.status().code(), StatusCode::environment);
  EXPECT_NE(std::string(cpu.status().text()).find("devices[1] is cpu"), std::string::npos)
      << cpu.status().text();
  Device const twice[] = {{DeviceKind::cuda, 3}, {DeviceKind::cuda, 3}};
  EXPECT_EQ(PeerWindow::open_all(twice, 1).status().code(), StatusCode::invalid_argument);
  EXPECT_EQ(PeerWindow::open_all({}, 1).status().code(), StatusCode::invalid_argument);
  Device const none[] = {{DeviceKind::cuda, 1000}};  // nor in a build without CUDA
  EXPECT_EQ(PeerWindow::open_all(none, 1).status().code(), StatusCode::environment);
}

// Python has this struct as nine words of 64 bits.
TEST(ExpertParallel, ABackwardPassIsAddressesInAFixedOrder) {
  EXPECT_EQ(sizeof(tessera_expert_backward_args), 80);
  EXPECT_EQ(offsetof(tessera_expert_backward_args, dispatch), 8);
  EXPECT_EQ(offsetof(tessera_expert_backward_args, weights), 48);
  EXPECT_EQ(offsetof(tessera_expert_backward_args, combine), 56);
  EXPECT_EQ(offsetof(tessera_expert_backward_args, side_stream), 64);
  EXPECT_EQ(offsetof(tessera_expert_backward_args, second_dispatch), 72);
}

TEST(ExpertParallel, TheCAbiSaysTheSame) {
  tessera_expert_parallel_desc desc = {};
  desc.size = sizeof desc;
  desc.ranks = 4;
  desc.max_tokens = 100;
  desc.hidden = 256;
  desc.intermediate = 128;
  desc.experts = 16;
  desc.top_k = 4;
  size_t bytes = 0;
  ASSERT_EQ(tessera_expert_parallel_window(&desc, &bytes), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(bytes, ExpertParallel::window_bytes(good()).value());

  ExpertParallelDesc combining = good();
  combining.partial_combine = true;
  desc.partial_combine = 1;
  ASSERT_EQ(tessera_expert_parallel_window(&desc, &bytes), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(bytes, ExpertParallel::window_bytes(combining).value());

  ExpertParallelDesc training = combining;
  training.training = true;
  desc.training = 1;
  ASSERT_EQ(tessera_expert_parallel_window(&desc, &bytes), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(bytes, ExpertParallel::window_bytes(training).value());

  desc.sms = 1;
  EXPECT_EQ(tessera_expert_parallel_window(&desc, &bytes), TESSERA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tessera_last_error()).find("sms=1"), std::string::npos);
  desc.sms = 0;

  tessera_context* context = nullptr;
  ASSERT_EQ(tessera_context_create(TESSERA_CPU, 0, 1, &context), TESSERA_OK);
  EXPECT_EQ(tessera_expert_parallel_workspace(context, &desc, &bytes), TESSERA_ENVIRONMENT);
  void* windows[4] = {};
  tessera_expert_parallel* group = nullptr;
  EXPECT_EQ(tessera_expert_parallel_create(context, &desc, windows, {}, &group),
            TESSERA_ENVIRONMENT);
  EXPECT_EQ(group, nullptr);
  EXPECT_EQ(tessera_expert_parallel_create(context, &desc, nullptr, {}, &group),
            TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_expert_parallel_forward(nullptr, nullptr, nullptr), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_expert_parallel_route(nullptr, nullptr, nullptr), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_expert_parallel_dispatch(nullptr, nullptr, nullptr), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_expert_parallel_combine(nullptr, nullptr, nullptr), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_expert_parallel_backward(nullptr, nullptr, nullptr), TESSERA_INVALID_ARGUMENT);
  int64_t rows = 0;
  EXPECT_EQ(tessera_expert_parallel_routed_rows(nullptr, 0, &rows, nullptr),
            TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_expert_parallel_check(nullptr), TESSERA_INVALID_ARGUMENT);
  tessera_expert_parallel_destroy(nullptr);

  tessera_peer_group_id id = {};
  tessera_peer_window* window = nullptr;
  EXPECT_EQ(tessera_peer_window_open(context, 0, 1, &id, 1, nullptr, &window), TESSERA_ENVIRONMENT);
  EXPECT_EQ(tessera_peer_window_close(nullptr), TESSERA_OK);
  int32_t const devices[2] = {1000, 1000};
  tessera_peer_window* all[2] = {reinterpret_cast<tessera_peer_window*>(&bytes)};
  EXPECT_EQ(tessera_peer_window_open_all(devices, 2, 1, all), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(all[0], nullptr) << "as on every error";
  EXPECT_EQ(tessera_peer_window_open_all(devices, 1, 1, all), TESSERA_ENVIRONMENT);
  EXPECT_EQ(tessera_peer_window_open_all(nullptr, 1, 1, all), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_peer_window_open_all(devices, 1 << 30, 1, all), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_peer_window_open_all(devices, -1, 1, all), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_peer_window_open_all(devices, 1, 1, nullptr), TESSERA_INVALID_ARGUMENT);
  tessera_peer_window_abort(nullptr);
  desc.top_k = 0;
  EXPECT_EQ(tessera_expert_parallel_window(&desc, &bytes), TESSERA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tessera_last_error()).find("top_k=0"), std::string::npos);
  tessera_context_destroy(context);
}

HostsDesc good_hosts() {
  HostsDesc desc;
  desc.place = {.host = 1, .hosts = 3, .rank = 2};
  desc.within = good();
  desc.within.rank = 2;
  desc.within.training = true;
  return desc;
}

TEST(HostsExperts, RulesNameFieldAndValue) {
  struct Bad {
    char const* text;
    void (*spoil)(HostsDesc&);
  };
  for (Bad const& bad : {
           Bad{"hosts=65: 1 to 64", [](HostsDesc& d) { d.place.hosts = 65; }},
           Bad{"host=3: 0 to hosts-1 = 2", [](HostsDesc& d) { d.place.host = 3; }},
           Bad{"place.rank=1, within.rank=2", [](HostsDesc& d) { d.place.rank = 1; }},
           Bad{"exchange=2", [](HostsDesc& d) { d.exchange = static_cast<HostExchange>(2); }},
           Bad{"top_k=17: 1 to 16", [](HostsDesc& d) { d.within.top_k = 17; }},
           Bad{"max_rows=1601: with training, 0 to ranks*max_tokens*top_k=1600",
               [](HostsDesc& d) { d.max_rows = 1601; }},
           Bad{"max_rows=5: with training",
               [](HostsDesc& d) {
                 d.max_rows = 5;
                 d.within.training = false;
               }},
       }) {
    HostsDesc desc = good_hosts();
    bad.spoil(desc);
    auto const bytes = HostsExperts::saved_bytes(desc);
    ASSERT_FALSE(bytes.ok()) << bad.text;
    EXPECT_EQ(bytes.status().code(), StatusCode::invalid_argument);
    EXPECT_NE(std::string(bytes.status().text()).find(bad.text), std::string::npos)
        << bytes.status().text();
  }
}

TEST(HostsExperts, SavesWhatCameAndRowsOfEachStep) {
  HostsDesc desc = good_hosts();
  desc.max_rows = 500;
  // Of each step h and 20 bytes of tables a row; of two steps x, ids and scores of 100 tokens; the own ids.
  std::size_t const step = 500 * (2 * 2 * 128 + 20) + 4 * 5;
  std::size_t const message = 100 * (2 * 256 + 8 * 4);
  std::size_t const least = 3 * step + 2 * message + 100 * 4 * 4;
  std::size_t const all_rows = HostsExperts::saved_bytes(desc).value();
  EXPECT_GE(all_rows, least);
  EXPECT_LE(all_rows, least + 24 * 256);
  desc.exchange = HostExchange::counted;  // and two lists of tokens for each host
  std::size_t const counted = HostsExperts::saved_bytes(desc).value();
  EXPECT_GE(counted, all_rows + 2 * 3 * 100 * 4 - 512);
  EXPECT_LE(counted, all_rows + 2 * 3 * 100 * 4 + 512);
}

TEST(HostsExperts, NeedsGpus) {
  auto const context = Context::create();
  ASSERT_TRUE(context.ok());
  auto const bytes = HostsExperts::workspace_bytes(context.value(), good_hosts());
  ASSERT_FALSE(bytes.ok());
  EXPECT_EQ(bytes.status().code(), StatusCode::environment) << bytes.status().text();
  auto const rail = HostRail::open(context.value(), {.host = 0, .hosts = 2}, {}, 30);
  ASSERT_FALSE(rail.ok());
  EXPECT_EQ(rail.status().code(), StatusCode::environment) << rail.status().text();
}

}  // namespace
}  // namespace tessera
