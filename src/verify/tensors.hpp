// SPDX-License-Identifier: Apache-2.0
// The compared results of a layer by name: o, dx, dscores [P] by slot, dlogits, dw_*, db_*; with a router also
// its logits and scores.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/context.hpp"
#include "verify/case.hpp"

namespace tessera::verify {

template <class T>
using TensorsOf = std::map<std::string, std::vector<T>>;
using Tensors = TensorsOf<float>;
using ReferenceTensors = TensorsOf<double>;

/// True if `name` is a weight or bias gradient, i.e. starts from initial_gradient() when accumulating.
inline bool is_parameter_gradient(std::string const& name) {
  return name.starts_with("dw_") || name.starts_with("db_");
}

/// The reference's results, gradients added to their first content where data.gradient_mode says so.
ReferenceTensors reference_tensors(LayerData const& data, reference::Forward const& forward,
                                   reference::Backward const& backward);

/// The textbook path in storage precision: every intermediate array is rounded, dot products run term by term
/// in fp32, ds = <dO, y>. Its errors measure what the precision itself costs. `sample` 0 rounds to nearest and sums in
/// ascending order of index; others sum in orders and round with errors that are drawn from it.
Tensors naive_tensors(LayerData const& data, reference::Inputs const& inputs,
                      reference::Metadata const& metadata, std::uint64_t sample = 0);

/// Several naive_tensors(): more where few numbers decide a result or a row, so that one could be lucky.
/// They run on the threads of `context`.
std::vector<Tensors> naive_samples(Context const& context, LayerData const& data,
                                   reference::Inputs const& inputs,
                                   reference::Metadata const& metadata);

}  // namespace tessera::verify
