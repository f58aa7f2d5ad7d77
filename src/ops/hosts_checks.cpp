// SPDX-License-Identifier: Apache-2.0
#include "ops/hosts_checks.hpp"

#include <initializer_list>

#include "core/tensor_check.hpp"
#include "core/workspace.hpp"
#include "expert_parallel/plan/biases.hpp"

namespace tessera::ops {
namespace {

// Tensors of a call: contiguous, at multiples of 16 bytes where asked for.
struct CallCheck {
  core::TensorCheck check;

  void input(char const* name, ConstTensor const& tensor, DType dtype,
             std::initializer_list<std::int64_t> shape) noexcept {
    check.input(name, tensor, dtype, shape);
    check.contiguous(name, tensor);
    aligned(name, tensor.data, dtype);
  }
  void output(char const* name, Tensor const& tensor, DType dtype,
              std::initializer_list<std::int64_t> shape) noexcept {
    check.output(name, tensor, dtype, shape);
    check.contiguous(name, tensor);
    aligned(name, tensor.data, dtype);
  }
  void optional_output(char const* name, Tensor const& tensor, DType dtype,
                       std::initializer_list<std::int64_t> shape) noexcept {
    if (tensor.present()) output(name, tensor, dtype, shape);
  }
  void aligned(char const* name, void const* data, DType dtype) noexcept {
    if (dtype == DType::bf16 && reinterpret_cast<std::uintptr_t>(data) % 16 != 0) {
      check.fail(Status::invalid("%s=%p: begins at a multiple of 16", name, data));
    }
  }
  template <class Args>
  void weights(HostsDesc const& d, Args const& args) noexcept {
    std::int64_t const experts = experts_of_rank(d), n = d.within.intermediate;
    input("w_up", args.w_up, DType::bf16, {experts, up_rows(d), d.within.hidden});
    input("w_down", args.w_down, DType::bf16, {experts, d.within.hidden, n});
    if (!args.b_up.present() && !args.b_down.present()) return;
    if (!expert_parallel::adds_biases(d.within.activation.kind)) {
      check.fail(Status::unsupported(
          "b_up, b_down: over several hosts with clamped_swiglu alone; use that "
          "activation, or leave the biases out"));
    }
    input("b_up", args.b_up, DType::bf16, {experts, up_rows(d)});
    input("b_down", args.b_down, DType::bf16, {experts, d.within.hidden});
  }
};

Expected<std::int64_t> tokens_of(HostsDesc const& d, char const* name,
                                 ConstTensor const& tensor) noexcept {
  if (tensor.rank == 2 && tensor.shape[0] >= 0 && tensor.shape[0] <= d.within.max_tokens) {
    return tensor.shape[0];
  }
  return Status::invalid("%s: [T,%lld] with T from 0 to max_tokens=%lld", name,
                         static_cast<long long>(d.within.hidden),
                         static_cast<long long>(d.within.max_tokens));
}

// The memory of a pass that was saved.
Expected<std::byte*> saved_memory(HostsDesc const& d, HostsSaved const& saved) noexcept {
  if (!d.within.training) {
    return Status::invalid("saved: training=0; create the objects with within.training");
  }
  auto const bytes = HostsExperts::saved_bytes(d);
  if (!bytes.ok()) return bytes.status();
  if (saved.memory.data == nullptr || saved.memory.bytes < bytes.value()) {
    return Status::invalid("saved.memory: %zu bytes; saved_bytes() are %zu", saved.memory.bytes,
                           bytes.value());
  }
  return core::WorkspacePlan::align(saved.memory.data);
}

}  // namespace

Status check_hosts(HostsDesc const& d) noexcept {
  HostPlace const& p = d.place;
  ExpertParallelDesc const& within = d.within;
  if (p.hosts < 1 || p.hosts > kMaxHosts) {
    return Status::invalid("hosts=%d: 1 to %d", p.hosts, kMaxHosts);
  }
  if (p.host < 0 || p.host >= p.hosts) {
    return Status::invalid("host=%d: 0 to hosts-1 = %d", p.host, p.hosts - 1);
  }
  if (p.rank != within.rank) {
    return Status::invalid("place.rank=%d, within.rank=%d: the same rank of its host", p.rank,
                           within.rank);
  }
  if (d.exchange != HostExchange::all_rows && d.exchange != HostExchange::counted) {
    return Status::invalid("exchange=%d: one of HostExchange", static_cast<int>(d.exchange));
  }
  // Checks `within`.
  auto const bytes = ExpertParallel::window_bytes(within);
  if (!bytes.ok()) return bytes.status();
  std::int64_t const most = std::int64_t{within.ranks} * within.max_tokens * within.top_k;
  if (d.max_rows < 0 || d.max_rows > most || (d.max_rows != 0 && !within.training)) {
    return Status::invalid("max_rows=%lld: with training, 0 to ranks*max_tokens*top_k=%lld",
                           static_cast<long long>(d.max_rows), static_cast<long long>(most));
  }
  return {};
}

Expected<CheckedPass> check_hosts_forward(HostsDesc const& d, Device device,
                                          HostsForwardArgs const& args) noexcept {
  auto const tokens = tokens_of(d, "x", args.x);
  if (!tokens.ok()) return tokens.status();
  std::int64_t const top_k = d.within.top_k, count = tokens.value();
  CallCheck call{core::TensorCheck{device}};
  call.input("x", args.x, DType::bf16, {count, d.within.hidden});
  call.input("topk_ids", args.topk_ids, DType::int32, {count, top_k});
  call.input("topk_weights", args.topk_weights, DType::fp32, {count, top_k});
  call.weights(d, args);
  call.output("o", args.o, DType::bf16, {count, d.within.hidden});
  TESSERA_TRY(call.check.finish());
  if (args.saved == nullptr) return CheckedPass{count, nullptr};
  auto const memory = saved_memory(d, *args.saved);
  if (!memory.ok()) return memory.status();
  return CheckedPass{count, memory.value()};
}

Expected<CheckedPass> check_hosts_backward(HostsDesc const& d, Device device,
                                           HostsBackwardArgs const& args) noexcept {
  auto const tokens = tokens_of(d, "d_o", args.d_o);
  if (!tokens.ok()) return tokens.status();
  if (args.saved == nullptr) {
    return Status::invalid("saved: absent; pass what forward() has saved");
  }
  auto const memory = saved_memory(d, *args.saved);
  if (!memory.ok()) return memory.status();
  std::int64_t const experts = experts_of_rank(d), count = tokens.value();
  std::int64_t const hidden = d.within.hidden, n = d.within.intermediate;
  CallCheck call{core::TensorCheck{device}};
  call.input("d_o", args.d_o, DType::bf16, {count, hidden});
  call.input("x", args.x, DType::bf16, {count, hidden});
  call.weights(d, args);
  call.output("dx", args.dx, DType::bf16, {count, hidden});
  call.output("dscores", args.dscores, DType::fp32, {count, d.within.top_k});
  call.optional_output("dw_up", args.dw_up, DType::fp32, {experts, up_rows(d), hidden});
  call.optional_output("dw_down", args.dw_down, DType::fp32, {experts, hidden, n});
  if (args.b_up.present()) {
    call.optional_output("db_up", args.db_up, DType::fp32, {experts, up_rows(d)});
    call.optional_output("db_down", args.db_down, DType::fp32, {experts, hidden});
  } else {
    call.check.absent("db_up", args.db_up, "there are no biases");
    call.check.absent("db_down", args.db_down, "there are no biases");
  }
  TESSERA_TRY(call.check.finish());
  return CheckedPass{count, memory.value()};
}

}  // namespace tessera::ops
