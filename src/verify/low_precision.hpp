// SPDX-License-Identifier: Apache-2.0
// A layer in FP8 or MXFP8 put together from the library's quantisers and grouped GEMMs, and when it is right.
#pragma once

#include "cpu/reference/low_precision.hpp"
#include "tessera/context.hpp"
#include "verify/tensors.hpp"

namespace tessera::verify {

/// Returns what the reference makes of the operands of a recipe.
reference::Recipe recipe_of(LowPrecision const& precision);

/// `data` with what its router chooses, on exact logits, as given ids and scores.
LayerData with_given_routing(LayerData const& data);

/// o, dx, dscores and the gradients of weights and biases of a layer with given routing: operands through quantise(),
/// quantise_weights() and dequantise(), sums by grouped_gemm() in fp32, everything that is stored rounded to bf16.
/// Errors: those of the library, before or during the run.
Expected<Tensors> low_precision_tensors(Context const& context, LayerData const& data,
                                        reference::Metadata const& metadata,
                                        LowPrecision const& precision);

/// 20 log10(|ref| / |ref - out|), dB; 999 where they are equal.
double sqnr_db(std::vector<double> const& ref, std::vector<float> const& out);

/// The recipe's results in fp64, which take the place of the naive path. A second sample where the activation has kinks
/// away from 0: there a code that rounding flips turns a gradient on or off, so in this sample every saved h within a
/// step of e4m3 of a kink lies on its other side.
std::vector<Tensors> recipe_samples(LayerData const& data, reference::Inputs const& inputs,
                                    LowPrecision const& precision);

/// Tensors of `out` that have 0.3 dB (ds, few numbers of which a few large ones decide: 1 dB) less than the recipe on
/// the same data, the worst of its samples; a line each. Codes that roundings flip cost hundredths. Tensors of less
/// than 4096 elements are left out.
std::vector<std::string> lost_db(ReferenceTensors const& ref, std::vector<Tensors> const& recipe,
                                 Tensors const& out);

}  // namespace tessera::verify
