// SPDX-License-Identifier: Apache-2.0
// What is said, and within which time, where a rank of another host dies, stalls or does not join, on a fake NCCL.
#include <gtest/gtest.h>

#include <atomic>
#include <string>

#include "tests/expert_parallel/host_problem.hpp"

namespace tessera::expert_parallel::hosts {
namespace {

// Two hosts of one rank: what the first is told when the second one does something else than a pass.
class LostRank : public HostsTest {
 protected:
  // lose_rank(rail): what the second rank does after a pass of both; `first`: set before the first one goes on. Said is
  // the text of its next pass, what its rail says once its stream is at rest, and how long that took.
  struct Said {
    std::string pass, check, next;
    double seconds = 0;
  };
  Said lose(bool counted, std::function<void(std::unique_ptr<Rail>&)> const& lose_rank,
            double time_limit = 0.3, std::atomic<bool> const* first = nullptr) {
    Problem const p = make_problem(2, 1, {7, 5}, Routing::random);
    NcclUniqueId const id = make_id();
    RotationShape const shape = {.hosts = 2,
                                 .max_tokens = p.max_tokens,
                                 .hidden = p.hidden,
                                 .top_k = p.top_k,
                                 .experts = 6,
                                 .counted = counted};
    Said said;
    std::barrier all(2);
    auto const run_rank = [&](std::size_t rank) {
      Queue queue;
      SharedHost host(p, static_cast<std::int32_t>(rank));
      auto rail = open({static_cast<std::int32_t>(rank), 2, 0}, id, time_limit);
      ASSERT_TRUE(rail.ok()) << rail.status().text();
      std::vector<std::byte> workspace(RotationRegions(shape).plan.bytes(), std::byte{0xff});
      std::vector<std::byte> saved(SavedRegions(shape, true).plan.bytes());
      std::vector<Bits> o(static_cast<std::size_t>(p.tokens[rank] * p.hidden));
      Rotation rotation(shape, *rail.value(), workspace.data(), kStream);
      InnerRank inner(host, 0);
      auto const pass = [&] {
        std::array<std::int64_t, kMaxHosts> out = {}, in = {};
        return rotation.forward({.tokens = p.tokens[rank],
                                 .gmem_x = p.x.data() + p.begins[rank] * p.hidden,
                                 .gmem_topk_ids = p.ids.data() + p.begins[rank] * p.top_k,
                                 .gmem_topk_weights = p.scores.data() + p.begins[rank] * p.top_k,
                                 .gmem_o = o.data(),
                                 .gmem_saved = saved.data()},
                                {out.data(), in.data()}, inner, {&queue});
      };
      EXPECT_TRUE(pass().ok());
      queue.drain();
      EXPECT_TRUE(rail.value()->fault().ok());
      all.arrive_and_wait();
      auto const start = std::chrono::steady_clock::now();
      if (rank == 1) {
        lose_rank(rail.value());
        all.arrive_and_wait();
        return;
      }
      if (first != nullptr) first->wait(false);
      said.pass = pass().text();
      queue.drain();
      said.check = rail.value()->fault().text();
      said.seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      said.next = pass().text();
      all.arrive_and_wait();
      EXPECT_FALSE(rail.value()->close().ok());
    };
    std::thread other([&] { run_rank(1); });
    run_rank(0);
    other.join();
    return said;
  }
  static void expect_named(Said const& said, std::string const& what, std::string const& why) {
    EXPECT_EQ(said.check, "rank 0 of host 0 at pass 2 (forward), " + what +
                              ": rank 0 of host 1 did not come (" + why +
                              "); destroy the rails and objects of all ranks and make them anew");
    EXPECT_EQ(said.next, said.check);
    EXPECT_LT(said.seconds, 10);
  }
};

TEST_F(LostRank, StallsWhileTheStreamWaits) {
  Said const said = lose(false, [](auto&) {});
  EXPECT_EQ(said.pass, "");  // the host does not wait
  expect_named(said, "rows to their experts", "no message within 0.3 s");
}

TEST_F(LostRank, StallsWhileTheHostWaits) {
  Said const said = lose(true, [](auto&) {});
  EXPECT_EQ(said.pass, said.check);
  expect_named(said, "numbers of rows", "no message within 0.3 s");
}

TEST_F(LostRank, DiesBeforeAPass) {
  nccl.tells = true;
  std::atomic<bool> is_gone = false;
  Said const said = lose(
      false,
      [&](auto& rail) {
        rail.reset();
        is_gone = true;
        is_gone.notify_one();
      },
      1000, &is_gone);
  EXPECT_EQ(said.pass, said.check);
  expect_named(said, "rows to their experts", "unhandled fake error");
}

TEST_F(LostRank, DiesWhileTheStreamWaits) {
  nccl.tells = true;
  Said const said = lose(
      false,
      [&](auto& rail) {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        rail.reset();
      },
      1000);
  EXPECT_EQ(said.pass, "");
  expect_named(said, "rows to their experts", "unhandled fake error");
}

TEST_F(HostsTest, ACallFails) {
  nccl.failing_group = 1;
  std::unique_ptr<Rail> rails[2];
  open_two(rails);
  Queue queue;
  int word = 0;
  Message const message = {&word, sizeof word, 1, &word, sizeof word, 1};
  EXPECT_TRUE(rails[0]->begin("forward").ok());
  Status const status = rails[0]->exchange("words", {&message, 1}, {&queue});
  EXPECT_NE(std::string(status.text()).find("words: rank 0 of host 1 did not come (unhandled"),
            std::string::npos)
      << status.text();
  EXPECT_EQ(rails[0]->sent()[1], 0);
}

TEST_F(HostsTest, ARankThatDoesNotJoin) {
  auto const rail = open({0, 2, 0}, make_id(), 0.2);
  ASSERT_FALSE(rail.ok());
  EXPECT_STREQ(rail.status().text(),
               "rank 0 of host 0 at pass 0 (joining), joining the rail: rank 0 of host 1 did not "
               "come (not within 0.2 s); destroy the rails and objects of all ranks and make them "
               "anew");
  EXPECT_EQ(nccl.aborted, 1);
}

TEST_F(HostsTest, HostsThatDiffer) {
  struct Said {
    std::int64_t values[3];
    std::string text[3];
  };
  for (Said const& wanted : {Said{{512, 512, 512}, {"", "", ""}},
                             Said{{512, 512, 256},
                                  {"hidden=512 on host 0, 256 on host 2: equal on all hosts",
                                   "hidden=512 on host 1, 256 on host 2: equal on all hosts",
                                   "hidden=256 on host 2, 512 on host 0: equal on all hosts"}}}) {
    NcclUniqueId const id = make_id();
    std::vector<std::thread> threads;
    for (std::int32_t host = 0; host < 3; ++host) {
      threads.emplace_back([&, host] {
        Queue queue;
        auto rail = open({host, 3, 0}, id);
        ASSERT_TRUE(rail.ok()) << rail.status().text();
        RotationShape const shape = {
            .hosts = 3, .max_tokens = 4, .hidden = 8, .top_k = 1, .experts = 2};
        std::vector<std::byte> workspace(RotationRegions(shape).plan.bytes(), std::byte{0xff});
        Rotation rotation(shape, *rail.value(), workspace.data(), kStream);
        Field const fields[] = {{"top_k", 4}, {"hidden", wanted.values[host]}};
        EXPECT_EQ(rotation.agree(fields, {&queue}).text(), wanted.text[host]);
        queue.drain();
        EXPECT_TRUE(rail.value()->close().ok());
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST_F(HostsTest, ACountedPassIsNotCaptured) {
  std::unique_ptr<Rail> rails[2];
  open_two(rails, 0.5);
  RotationShape const shape = {
      .hosts = 2, .max_tokens = 4, .hidden = 8, .top_k = 1, .experts = 2, .counted = true};
  std::vector<std::byte> workspace(RotationRegions(shape).plan.bytes());
  Rotation rotation(shape, *rails[0], workspace.data(), kStream);
  Problem const problem = make_problem(2, 1, {1, 1}, Routing::random);
  SharedHost host(problem, 0);
  InnerRank inner(host, 0);
  Queue queue;
  std::array<std::int64_t, kMaxHosts> out = {}, in = {};
  all_capture = true;
  Status const status =
      rotation.forward({.gmem_saved = workspace.data()}, {out.data(), in.data()}, inner, {&queue});
  all_capture = false;
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_NE(std::string(status.text()).find("exchange=counted: "), std::string::npos);
  EXPECT_EQ(rails[0]->sent()[1], 0);
  for (auto& rail : rails) EXPECT_TRUE(rail->close().ok());
}

// As from a host whose desc allows more.
TEST_F(HostsTest, MoreRowsThanMemoryAreRefused) {
  for (std::int64_t const rows : {std::int64_t{5}, std::int64_t{-1}}) {
    std::unique_ptr<Rail> rails[2];
    open_two(rails);
    RotationShape const shape = {
        .hosts = 2, .max_tokens = 4, .hidden = 8, .top_k = 1, .experts = 6, .counted = true};
    std::vector<std::byte> workspace(RotationRegions(shape).plan.bytes());
    std::vector<std::byte> saved(SavedRegions(shape, true).plan.bytes());
    Rotation rotation(shape, *rails[0], workspace.data(), kStream);
    Problem const problem = make_problem(2, 1, {1, 1}, Routing::random, 1);
    SharedHost host(problem, 0);
    InnerRank inner(host, 0);
    Queue queue, of_other;
    std::int64_t sent = rows, came = -1;
    Message const numbers = {&sent, sizeof sent, 0, &came, sizeof came, 0};
    EXPECT_TRUE(rails[1]->begin("forward").ok());
    EXPECT_TRUE(rails[1]->exchange("numbers of rows", {&numbers, 1}, {&of_other}).ok());
    std::array<std::int64_t, kMaxHosts> out = {}, in = {};
    Status const status = rotation.forward({.gmem_saved = saved.data(), .saves = true},
                                           {out.data(), in.data()}, inner, {&queue});
    std::string const says = "host 1 sends " + std::to_string(rows) + " rows: at most max_tokens=4";
    EXPECT_NE(std::string(status.text()).find(says), std::string::npos) << status.text();
    queue.drain();
    of_other.drain();
    EXPECT_EQ(came, 0);
  }
}

TEST_F(HostsTest, TimeAheadOfAWaitDoesNotCount) {
  std::unique_ptr<Rail> rails[2];
  open_two(rails, 0.2);
  Queue queues[2];
  int words[2][2] = {{3, 0}, {4, 0}};
  for (int h = 0; h < 2; ++h) {
    queues[h].enqueue([] { std::this_thread::sleep_for(std::chrono::milliseconds(600)); });
    Message const message = {&words[h][0], sizeof(int), 1 - h, &words[h][1], sizeof(int), 1 - h};
    EXPECT_TRUE(rails[h]->exchange("words", {&message, 1}, {&queues[h]}).ok());
  }
  for (int h = 0; h < 2; ++h) {
    queues[h].drain();
    EXPECT_TRUE(rails[h]->fault().ok()) << rails[h]->fault().text();
    EXPECT_EQ(words[h][1], 4 - h);
    EXPECT_TRUE(rails[h]->close().ok());
  }
  Message const message = {&words[0][0], 4, 1, nullptr, 0, 1};
  EXPECT_STREQ(rails[0]->exchange("words", {&message, 1}, {&queues[0]}).text(),
               "the rail is closed; open another");
}

TEST_F(HostsTest, NumbersThatDoNotComeAreNotRead) {
  std::unique_ptr<Rail> rails[2];
  open_two(rails, 0.2);
  Queue queue;
  int word = 5, read = 7;
  Message const message = {nullptr, 0, 1, &word, sizeof word, 1};
  EXPECT_TRUE(rails[0]->begin("forward").ok());
  EXPECT_TRUE(rails[0]->exchange("numbers", {&message, 1}, {&queue}).ok());
  EXPECT_EQ(rails[0]->read(&read, &word, sizeof word, {&queue}).code(), StatusCode::device_error);
  EXPECT_EQ(read, 7);
  queue.drain();
}

TEST_F(HostsTest, Refusals) {
  NcclUniqueId const id = make_id();
  auto const text = [&](HostPlace const& place, double limit) {
    return std::string(open(place, id, limit).status().text());
  };
  EXPECT_EQ(text({0, 65, 0}, 1), "hosts=65: 1 to 64");
  EXPECT_EQ(text({2, 2, 0}, 1), "host=2: 0 to hosts-1 = 1");
  EXPECT_EQ(text({0, 2, 8}, 1), "rank=8: 0 to 7, within a host");
  EXPECT_EQ(text({0, 2, 0}, 0), "time_limit=0: seconds, above 0 and at most a day");
  auto const multicast =
      Rail::open({.place = {0, 2, 0}, .id = id, .nccl_path = FAKE_NCCL_PATH}, kDevice, kStream);
  EXPECT_EQ(multicast.status().code(), StatusCode::environment);
}

}  // namespace
}  // namespace tessera::expert_parallel::hosts
