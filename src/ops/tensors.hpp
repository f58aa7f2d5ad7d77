// SPDX-License-Identifier: Apache-2.0
// The tensors of each call of a layer, listed once: name, tensor, role, dtype and shape, in the order in which errors
// are looked for. TensorCheck visits them before a call, tests poison those that are written.
#pragma once

#include <cstddef>

#include "core/tensor_check.hpp"
#include "tessera/balance.hpp"
#include "tessera/moe.hpp"
#include "tessera/routing.hpp"

namespace tessera::ops {

// desc: resolved, and accepted by check_supported(). workspace: bytes that the call needs.

void visit_tensors(MoeDesc const& desc, MoeForwardArgs const& args, std::size_t workspace,
                   core::TensorVisitor& visitor) noexcept;
/// pass: backward, backward_input or backward_weights.
void visit_tensors(MoeDesc const& desc, MoeBackwardArgs const& args, Pass pass,
                   std::size_t workspace, core::TensorVisitor& visitor) noexcept;
void visit_tensors(MoeDesc const& desc, RouteArgs const& args, std::size_t workspace,
                   core::TensorVisitor& visitor) noexcept;
void visit_tensors(MoeDesc const& desc, RouterLossArgs const& args, std::size_t workspace,
                   core::TensorVisitor& visitor) noexcept;

/// The first rule that a tensor breaks; `more` as in visit_tensors().
template <class Args, class... More>
Status check_tensors(Device device, MoeDesc const& desc, Args const& args, More... more) noexcept {
  core::TensorCheck check{device};
  visit_tensors(desc, args, more..., check);
  return check.finish();
}

}  // namespace tessera::ops
