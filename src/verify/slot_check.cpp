// SPDX-License-Identifier: Apache-2.0
// Token rounding and expert choice must keep this, whatever the rounding of the scores: each expert's number of rows
// follows from counts alone (nr_s: from sums, up to a margin); what is kept ranks before what is not, up to slack;
// equal scores go to the lower token.
#include <algorithm>
#include <cmath>

#include "core/philox.hpp"
#include "verify/runner.hpp"

namespace tessera::verify {
namespace {

using reference::RankedToken;

/// The slack of a score, by fp32's exp and division; and that of the sums of nr_s.
constexpr double kScoreSlack = 0x1p-16, kSumSlack = 0x1p-14;

std::string of_expert(std::int64_t expert) { return "slots: expert " + std::to_string(expert); }

std::string list_failure(MoeDesc const& desc, RouterChoice const& choice) {
  auto const& offsets = choice.token_offsets;
  std::int64_t const tokens = desc.shape.tokens;
  if (offsets.front() != 0 || offsets.back() > desc.num_slots()) {
    return "slots: token_offsets leave [0, slots]";
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (offsets[t] > offsets[t + 1]) return "slots: token_offsets decrease";
    for (std::int64_t j = offsets[t]; j < offsets[t + 1]; ++j) {
      std::int64_t const id = choice.topk_ids[j];
      if (id < 0 || id >= desc.shape.experts) return "slots: an id is out of range";
      if (j > offsets[t] && id <= choice.topk_ids[j - 1]) {
        return "slots: token " + std::to_string(t) + " has its experts out of order";
      }
    }
  }
  for (std::int64_t j = offsets.back(); j < desc.num_slots(); ++j) {
    if (choice.topk_ids[j] != -1) return "slots: an unused slot has an id";
  }
  return {};
}

/// True if nr_s stands so near its line that fp32 may decide either way. Both decisions are right then, nothing else.
bool near_line(MoeDesc const& desc, std::int64_t expert, std::vector<RankedToken> const& ranked) {
  if (desc.router.round != Rounding::nr_s) return false;
  auto const [lost, gained] = reference::lost_and_gained(desc, ranked);
  if (lost + gained == 0) return false;
  double const share = static_cast<double>(core::rounding_random(desc.router, expert)) * 0x1p-32;
  return std::abs(share * (lost + gained) - lost) <= kSumSlack * (lost + gained);
}

std::string rank_failure(std::int64_t expert, std::vector<RankedToken> const& ranked,
                         std::vector<char> const& kept) {
  RankedToken const* first_lost[2] = {};  // by class: others, members
  for (RankedToken const& token : ranked) {
    bool const keeps = kept[token.token] != 0;
    RankedToken const*& lost = first_lost[token.member ? 1 : 0];
    if (!keeps) {
      if (lost == nullptr) lost = &token;
      continue;
    }
    std::string const where = of_expert(expert) + " keeps token " + std::to_string(token.token);
    if (!token.member && first_lost[1] != nullptr) {
      return where + ", which did not choose it, and drops one that did";
    }
    if (lost == nullptr) continue;
    if (lost->score == token.score) return where + ": a tie went to the higher token";
    if (lost->score > token.score * (1 + kScoreSlack)) {
      return where + " and not token " + std::to_string(lost->token) + " of higher score";
    }
  }
  return {};
}

}  // namespace

std::vector<std::string> slot_failures(MoeDesc const& desc, reference::PairScores const& pairs,
                                       RouterChoice const& choice) {
  std::string const list = list_failure(desc, choice);
  if (!list.empty()) return {list};
  std::int64_t const tokens = desc.shape.tokens;
  std::vector<std::vector<char>> kept(desc.shape.experts, std::vector<char>(tokens, 0));
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t j = choice.token_offsets[t]; j < choice.token_offsets[t + 1]; ++j) {
      kept[choice.topk_ids[j]][t] = 1;
    }
  }
  std::int64_t carry = 0;
  for (std::int64_t e = 0; e < desc.shape.experts; ++e) {
    auto const ranked = reference::rank_tokens(desc, pairs, e);
    auto const members = std::count_if(ranked.begin(), ranked.end(),
                                       [](RankedToken const& token) { return token.member; });
    std::int64_t const rows = std::count(kept[e].begin(), kept[e].end(), 1);
    std::int64_t const rule = desc.experts_choose()
                                  ? desc.expert_capacity()
                                  : reference::rounded_count(desc, e, ranked, carry);
    carry += rule - members;
    MoeDesc down = desc, up = desc;
    down.router.round = Rounding::down;
    up.router.round = Rounding::up;
    bool const either =
        near_line(desc, e, ranked) && (rows == reference::rounded_count(down, e, ranked, 0) ||
                                       rows == reference::rounded_count(up, e, ranked, 0));
    if (rows != rule && !either) {
      return {of_expert(e) + " has " + std::to_string(rows) + " rows of " +
              std::to_string(members) + " choices, the rule gives " + std::to_string(rule)};
    }
    std::int64_t eligible = 0;
    for (RankedToken const& token : ranked) eligible += kept[e][token.token];
    if (eligible != rows) return {of_expert(e) + " keeps a token that is not eligible"};
    std::string const rank = rank_failure(e, ranked, kept[e]);
    if (!rank.empty()) return {rank};
  }
  return {};
}

}  // namespace tessera::verify
