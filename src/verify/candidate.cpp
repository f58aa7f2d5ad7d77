// SPDX-License-Identifier: Apache-2.0
#include "verify/candidate.hpp"

#include <algorithm>
#include <cstring>
#include <optional>

#include "device/device.hpp"
#include "verify/layer_arguments.hpp"
#include "verify/storage.hpp"

namespace tessera::verify {
namespace {

bool equal_bits(std::vector<float> const& a, std::vector<float> const& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

/// One run: x, h and the routing tables stay; everything else comes and goes with its phase.
class Run {
 public:
  Run(Context const& context, LayerData const& data, std::uint32_t poison, Alignment alignment)
      : context_(context),
        data_(data),
        desc_(data.desc),
        poison_(poison),
        alignment_(alignment),
        saved_(fresh_memory()),
        inputs_(fresh_memory()) {
    if (on_gpu()) stream_.emplace(context.device().index);
  }

  Status forward_calls(CandidateResult& result) {
    TESSERA_TRY(forward(result));
    TESSERA_TRY(inference(result));
    return on_gpu() ? replay(result) : Status();
  }

  Status backward_calls(CandidateResult& result) {
    TESSERA_TRY(backward(result));
    TESSERA_TRY(split_backward(result));
    TESSERA_TRY(partial_backward(result));
    if (desc_.save == SavePolicy::h) TESSERA_TRY(overwriting_backward(result));
    if (on_gpu()) TESSERA_TRY(replay_backward(result));
    if (!saved_.intact() || !inputs_.intact()) {
      result.failures.emplace_back("backward wrote to x, h or routing, or a canary beside them");
    }
    return {};
  }

 private:
  Expected<std::size_t> workspace_size(MoeDesc const& desc, Pass pass, CandidateResult& result) {
    auto bytes = workspace_bytes(context_, desc, pass);
    if (bytes.ok()) result.transient_bytes = std::max(result.transient_bytes, bytes.value());
    return bytes;
  }

  static void check_memory(Memory const& memory, char const* phase, CandidateResult& result) {
    if (!memory.intact()) {
      result.failures.push_back(std::string(phase) + ": wrote to an input or beside a buffer");
    }
  }

  Status forward(CandidateResult& result) {
    MoeShape const& s = desc_.shape;
    auto const tables = routing_bytes(desc_);
    if (!tables.ok()) return tables.status();
    auto const workspace = workspace_size(desc_, Pass::forward, result);
    if (!workspace.ok()) return workspace.status();

    // Where x8 is saved, x is not: it lives for the forward calls.
    x_ = (desc_.quantises() ? inputs_ : saved_).input(desc_.dtype, {s.tokens, s.hidden}, data_.x);
    auto const saved = saved_tensors(desc_, saved_);
    h_ = saved.h;
    x8_ = saved.x8;
    x_scale_ = saved.x_scale;
    h_scale_ = saved.h_scale;
    routing_ = saved_.buffer(tables.value());
    result.saved_bytes = saved_.bytes();

    Memory memory = fresh_memory();
    MoeForwardArgs args = forward_inputs(data_, memory, x_);
    args.o = memory.output(desc_.dtype, {s.tokens, s.hidden});
    args.expert_counts = memory.output(DType::int32, {s.experts});
    args.topk_counts = memory.output(DType::int32, {s.experts});
    if (has_router()) args.logits = memory.output(DType::fp32, {s.tokens, s.experts});
    args.h = h_;
    args.x8 = x8_;
    args.x_scale = x_scale_;
    args.h_scale = h_scale_;
    args.routing = routing_;
    args.workspace = memory.buffer(workspace.value());
    TESSERA_TRY(run_forward(desc_, args));
    check_memory(memory, "forward", result);

    result.tensors["o"] = values_of(args.o);
    if (has_router()) result.tensors["logits"] = values_of(args.logits);
    TESSERA_TRY(read_routing(result));
    result.h = saved_values(args, result.metadata.rows());
    check_counts(static_cast<std::int32_t const*>(args.expert_counts.data),
                 static_cast<std::int32_t const*>(args.topk_counts.data), result);
    return {};
  }

  /// Returns what a repeat must equal of what forward saved: rows of h; where operands are quantised the bytes of x8,
  /// of the rows of h and of their scales.
  [[nodiscard]] std::vector<float> saved_values(MoeForwardArgs const& args,
                                                std::int64_t rows) const {
    if (!desc_.quantises()) {
      if (!args.h.present()) return {};
      return unpack(desc_.dtype, args.h.data,
                    static_cast<std::size_t>(rows * desc_.up_width() * desc_.shape.intermediate));
    }
    std::vector<float> out;
    auto const add = [&out](Tensor const& tensor, std::int64_t count) {
      if (!tensor.present()) return;
      auto const* const bytes = static_cast<std::uint8_t const*>(tensor.data);
      std::size_t const row = memory_bytes(tensor) / static_cast<std::size_t>(tensor.shape[0]);
      out.insert(out.end(), bytes, bytes + row * static_cast<std::size_t>(count));
    };
    std::int64_t const tokens = desc_.shape.tokens;
    if (tokens > 0) add(args.x8, tokens), add(args.x_scale, tokens);
    if (rows == 0) return out;
    add(args.h, rows);
    if (desc_.precision == Precision::mxfp8) {
      add(args.h_scale, rows);
      return out;
    }
    auto const* const scales = static_cast<float const*>(args.h_scale.data);
    for (std::int64_t i = 0; scales != nullptr && i < args.h_scale.shape[0]; ++i) {
      float const* const row = scales + i * args.h_scale.shape[1];
      out.insert(out.end(), row, row + rows);
    }
    return out;
  }

  void check_counts(std::int32_t const* rows, std::int32_t const* chosen,
                    CandidateResult& result) const {
    auto const& offsets = result.metadata.expert_offsets;
    std::vector<std::int64_t> unrounded(desc_.shape.experts, 0);
    for (std::int64_t const id : result.choice.unrounded_ids) {
      if (id >= 0 && id < desc_.shape.experts) ++unrounded[id];
    }
    for (std::int64_t e = 0; e < desc_.shape.experts; ++e) {
      std::int64_t const own = offsets[e + 1] - offsets[e];
      if (rows[e] != own) {
        result.failures.push_back("expert_counts[" + std::to_string(e) +
                                  "] is not the difference of expert_offsets");
        return;
      }
      if (chosen[e] != (desc_.rounds_tokens() ? unrounded[e] : own)) {
        result.failures.push_back("topk_counts[" + std::to_string(e) +
                                  "] is not how many tokens chose it");
        return;
      }
    }
  }

  Status read_routing(CandidateResult& result) {
    auto view = routing_view(desc_, routing_);
    if (!view.ok()) return view.status();
    RoutingView const& v = view.value();
    std::int64_t const slots = desc_.num_slots();
    auto const copy = [](std::int32_t const* from, std::int64_t count) {
      return from == nullptr ? std::vector<std::int64_t>{}
                             : std::vector<std::int64_t>(from, from + count);
    };
    result.metadata.expert_offsets = copy(v.expert_offsets, desc_.shape.experts + 1);
    result.metadata.sort_permutation = copy(v.sort_permutation, slots);
    result.metadata.gather_index = copy(v.gather_index, slots);
    result.metadata.inverse_permutation = copy(v.inverse_permutation, slots);
    result.metadata.token_offsets = copy(v.token_offsets, desc_.shape.tokens + 1);
    result.choice = {copy(v.topk_ids, slots), result.metadata.token_offsets,
                     copy(v.unrounded_ids, desc_.shape.tokens * desc_.shape.top_k)};
    result.tensors["scores"].assign(v.scores, v.scores + slots);
    std::int64_t const rows = result.metadata.rows();
    if (rows < 0 || rows > slots) {
      return Status::error(StatusCode::internal, "expert_offsets: last entry %lld, of %lld slots",
                           static_cast<long long>(rows), static_cast<long long>(slots));
    }
    return {};
  }

  Status inference(CandidateResult& result) {
    MoeDesc desc = desc_;
    desc.save = SavePolicy::none;
    auto const workspace = workspace_size(desc, Pass::forward, result);
    if (!workspace.ok()) return workspace.status();
    Memory memory = fresh_memory();
    MoeForwardArgs args = forward_inputs(data_, memory, x_);
    args.o = memory.output(desc.dtype, {desc.shape.tokens, desc.shape.hidden});
    args.workspace = memory.buffer(workspace.value());
    TESSERA_TRY(run_forward(desc, args));
    check_memory(memory, "inference", result);
    if (!equal_bits(values_of(args.o), result.tensors["o"])) {
      result.failures.emplace_back("inference: o differs from training's");
    }
    return {};
  }

  /// Captures the call that forward() made into a graph and launches it twice.
  Status replay(CandidateResult& result) {
    MoeShape const& s = desc_.shape;
    auto const workspace = workspace_size(desc_, Pass::forward, result);
    if (!workspace.ok()) return workspace.status();
    Memory memory = fresh_memory();
    MoeForwardArgs args = forward_inputs(data_, memory, x_);
    args.o = memory.output(desc_.dtype, {s.tokens, s.hidden});
    auto const again = [&memory](Tensor const& like) {
      return like.present() ? memory.output(like.dtype, {like.shape[0], like.shape[1]}) : Tensor();
    };
    args.h = again(h_);
    args.x8 = again(x8_);
    args.x_scale = again(x_scale_);
    args.h_scale = again(h_scale_);
    args.routing = memory.buffer(routing_.bytes);
    args.workspace = memory.buffer(workspace.value());
    Status captured;
    device::Graph const graph(
        *stream_, [&] { captured = moe_forward(context_, desc_, args, stream_->handle()); });
    TESSERA_TRY(captured);
    for (int launch = 0; launch < 2; ++launch) {
      stream_->fill(args.o.data, 0xff, memory_bytes(args.o));
      stream_->fill(args.workspace.data, 0xff, args.workspace.bytes);
      graph.launch(*stream_);
      stream_->synchronize();
      if (!equal_bits(values_of(args.o), result.tensors["o"])) {
        result.failures.emplace_back("graph replay: o differs from the eager call's");
      }
      if (!equal_bits(saved_values(args, result.metadata.rows()), result.h)) {
        result.failures.emplace_back("graph replay: h differs from the eager call's");
      }
      if (std::memcmp(args.routing.data, routing_.data, routing_.bytes) != 0) {
        result.failures.emplace_back("graph replay: the routing tables differ");
      }
    }
    check_memory(memory, "graph replay", result);
    return {};
  }

  /// Returns what every backward call reads, with fresh copies of the weights.
  MoeBackwardArgs backward_inputs(Memory& memory, Pass pass = Pass::backward) {
    MoeShape const& s = desc_.shape;
    MoeBackwardArgs args;
    args.d_o = memory.input(desc_.dtype, {s.tokens, s.hidden}, data_.d_o);
    if (!desc_.quantises()) args.x = x_;
    args.h = h_;
    bool const reads_x = pass != Pass::backward_input || desc_.save == SavePolicy::x;
    if (reads_x) args.x8 = x8_, args.x_scale = x_scale_;
    if (pass != Pass::backward_weights) args.h_scale = h_scale_;
    args.routing = routing_;
    args.weights = weight_arguments(data_, memory);
    args.gradients.mode = data_.gradient_mode;
    if (!data_.token_mask.empty()) args.token_mask = memory.input_mask(data_.token_mask);
    if (has_router()) {
      DType const storage = desc_.router_storage();
      args.w_router = memory.input(storage, {s.experts, s.hidden}, data_.w_router);
      if (!data_.b_router.empty()) {
        args.b_router = memory.input(storage, {s.experts}, data_.b_router);
      }
      if (!data_.aux_dlogits.empty() && pass != Pass::backward_weights) {
        args.aux_dlogits = memory.input(DType::fp32, {s.tokens, s.experts}, data_.aux_dlogits);
      }
    }
    return args;
  }

  void add_gradient(GradientOutput const& output, Memory& memory, MoeBackwardArgs& args) {
    Tensor& tensor = gradient_argument(args, output.name);
    tensor = memory.output(output.dtype, output.shape);
    initialise_gradient(data_, output, tensor);
  }

  Status backward(CandidateResult& result) {
    auto const workspace = workspace_size(desc_, Pass::backward, result);
    if (!workspace.ok()) return workspace.status();
    Memory memory = fresh_memory();
    MoeBackwardArgs args = backward_inputs(memory);
    auto const outputs = gradient_outputs(data_);
    for (auto const& output : outputs) add_gradient(output, memory, args);
    args.workspace = memory.buffer(workspace.value());
    TESSERA_TRY(run_backward(desc_, Pass::backward, args));
    check_memory(memory, "backward", result);
    for (auto const& output : outputs) {
      result.tensors[output.name] = values_of(gradient_argument(args, output.name));
    }
    return {};
  }

  /// Compares gradients that another way of calling gave with those of backward().
  void expect_same(std::vector<GradientOutput> const& outputs, MoeBackwardArgs& args,
                   char const* phase, CandidateResult& result) {
    for (auto const& output : outputs) {
      Tensor const& tensor = gradient_argument(args, output.name);
      if (tensor.present() && !equal_bits(values_of(tensor), result.tensors[output.name])) {
        result.failures.push_back(std::string(phase) + ": " + output.name +
                                  " differs from moe_backward's");
      }
    }
  }

  Status split_backward(CandidateResult& result) {
    MoeShape const& s = desc_.shape;
    Memory between = fresh_memory();
    Tensor const dh =
        between.output(desc_.dtype, {desc_.num_slots(), desc_.up_width() * s.intermediate});
    Tensor const a_scaled = between.output(desc_.dtype, {desc_.num_slots(), s.intermediate});
    Tensor dlogits_saved;
    if (has_router()) dlogits_saved = between.output(DType::fp32, {s.tokens, s.experts});

    auto const outputs = gradient_outputs(data_);
    for (Pass const pass : {Pass::backward_input, Pass::backward_weights}) {
      bool const weights = pass == Pass::backward_weights;
      auto const workspace = workspace_size(desc_, pass, result);
      if (!workspace.ok()) return workspace.status();
      Memory memory = fresh_memory();
      MoeBackwardArgs args = backward_inputs(memory, pass);
      args.dh = dh;
      args.a_scaled = a_scaled;
      args.dlogits_saved = dlogits_saved;
      for (auto const& output : outputs) {
        if (output.of_weights == weights) add_gradient(output, memory, args);
      }
      args.workspace = memory.buffer(workspace.value());
      TESSERA_TRY(run_backward(desc_, pass, args));
      check_memory(memory, "split backward", result);
      expect_same(outputs, args, "split backward", result);
    }
    check_memory(between, "split backward", result);
    return {};
  }

  /// Leaves out every other gradient, then the others: what is computed does not depend on it.
  Status partial_backward(CandidateResult& result) {
    auto const workspace = workspace_size(desc_, Pass::backward, result);
    if (!workspace.ok()) return workspace.status();
    auto const outputs = gradient_outputs(data_);
    for (std::size_t first : {0, 1}) {
      Memory memory = fresh_memory();
      MoeBackwardArgs args = backward_inputs(memory);
      for (std::size_t i = first; i < outputs.size(); i += 2) {
        add_gradient(outputs[i], memory, args);
      }
      args.workspace = memory.buffer(workspace.value());
      TESSERA_TRY(run_backward(desc_, Pass::backward, args));
      check_memory(memory, "partial backward", result);
      expect_same(outputs, args, "partial backward", result);
    }
    return {};
  }

  /// dh, or its codes, in the memory of h, whole and split, from copies of h.
  Status overwriting_backward(CandidateResult& result) {
    MoeShape const& s = desc_.shape;
    MoeDesc desc = desc_;
    desc.overwrite_h = true;
    bool const quantises = desc.quantises();
    Memory between = fresh_memory();
    auto const copy_of = [&between](Tensor const& from) {
      Tensor const copy = between.output(from.dtype, {from.shape[0], from.shape[1]});
      std::memcpy(copy.data, from.data, memory_bytes(from));
      return copy;
    };
    auto const run = [&](Pass pass, Tensor const& h, Tensor const& dh, Tensor const& a_scaled,
                         Tensor const& dlogits_saved) -> Status {
      auto const workspace = workspace_size(desc, pass, result);
      TESSERA_TRY(workspace.status());
      Memory memory = fresh_memory();
      MoeBackwardArgs args = backward_inputs(memory, pass);
      args.h = h;
      bool const whole = pass == Pass::backward, weights = pass == Pass::backward_weights;
      if (quantises && !weights) args.h_scale = copy_of(h_scale_);
      if (weights || quantises) args.dh = dh;
      args.a_scaled = a_scaled;
      args.dlogits_saved = dlogits_saved;
      std::vector<GradientOutput> outputs = gradient_outputs(data_);
      std::erase_if(outputs,
                    [&](auto const& output) { return !whole && output.of_weights != weights; });
      for (auto const& output : outputs) add_gradient(output, memory, args);
      args.workspace = memory.buffer(workspace.value());
      TESSERA_TRY(run_backward(desc, pass, args));
      check_memory(memory, "backward over h", result);
      expect_same(outputs, args, "backward over h", result);
      return {};
    };
    Tensor const a_scaled = between.output(desc_.dtype, {desc_.num_slots(), s.intermediate});
    Tensor dlogits_saved;
    if (has_router()) dlogits_saved = between.output(DType::fp32, {s.tokens, s.experts});
    Status status = run(Pass::backward, copy_of(h_), {}, {}, {});
    Tensor const h = copy_of(h_);
    Tensor const dh = quantises ? between.output(desc_.dtype, {h_.shape[0], h_.shape[1]}) : h;
    if (status.ok()) status = run(Pass::backward_input, h, dh, a_scaled, dlogits_saved);
    if (status.ok()) status = run(Pass::backward_weights, h, dh, a_scaled, dlogits_saved);
    check_memory(between, "backward over h", result);
    return status;
  }

  /// Captures the call that backward() made into a graph and launches it twice.
  Status replay_backward(CandidateResult& result) {
    auto const workspace = workspace_size(desc_, Pass::backward, result);
    if (!workspace.ok()) return workspace.status();
    Memory memory = fresh_memory();
    MoeBackwardArgs args = backward_inputs(memory);
    auto const outputs = gradient_outputs(data_);
    for (auto const& output : outputs) add_gradient(output, memory, args);
    args.workspace = memory.buffer(workspace.value());
    Status captured;
    device::Graph const graph(*stream_,
                              [&] { captured = call_backward(desc_, Pass::backward, args); });
    TESSERA_TRY(captured);
    for (int launch = 0; launch < 2; ++launch) {
      stream_->fill(args.workspace.data, 0xff, args.workspace.bytes);
      for (auto const& output : outputs) {
        Tensor const& tensor = gradient_argument(args, output.name);
        stream_->fill(tensor.data, 0xff, memory_bytes(tensor));
        stream_->synchronize();
        initialise_gradient(data_, output, tensor);
      }
      graph.launch(*stream_);
      stream_->synchronize();
      expect_same(outputs, args, "backward by graph replay", result);
    }
    check_memory(memory, "backward by graph replay", result);
    return {};
  }

  [[nodiscard]] bool on_gpu() const { return context_.device().kind == DeviceKind::cuda; }
  [[nodiscard]] Memory fresh_memory() const {
    return Memory(poison_, alignment_, context_.device());
  }

  /// One call, and on a GPU what it found on the device, waited for.
  Status run_forward(MoeDesc const& desc, MoeForwardArgs const& args) {
    if (!on_gpu()) return moe_forward(context_, desc, args);
    TESSERA_TRY(moe_forward(context_, desc, args, stream_->handle()));
    stream_->synchronize();
    return check_device_values(context_);
  }

  Status call_backward(MoeDesc const& desc, Pass pass, MoeBackwardArgs const& args) {
    auto const stream = on_gpu() ? stream_->handle() : tessera::Stream{};
    switch (pass) {
      case Pass::backward_input:
        return moe_backward_input(context_, desc, args, stream);
      case Pass::backward_weights:
        return moe_backward_weights(context_, desc, args, stream);
      default:
        return moe_backward(context_, desc, args, stream);
    }
  }
  Status run_backward(MoeDesc const& desc, Pass pass, MoeBackwardArgs const& args) {
    TESSERA_TRY(call_backward(desc, pass, args));
    if (!on_gpu()) return {};
    stream_->synchronize();
    return check_device_values(context_);
  }

  [[nodiscard]] bool has_router() const { return desc_.router.kind != RouterKind::given; }

  static std::size_t memory_bytes(Tensor const& tensor) {
    return static_cast<std::size_t>(tensor.elements()) * dtype_bytes(tensor.dtype);
  }
  static std::vector<float> values_of(Tensor const& tensor) {
    return unpack(tensor.dtype, tensor.data, static_cast<std::size_t>(tensor.elements()));
  }
  Context const& context_;
  LayerData const& data_;
  MoeDesc desc_;
  std::uint32_t poison_;
  Alignment alignment_;
  std::optional<device::Stream> stream_;  ///< on a GPU
  Memory saved_;
  Memory inputs_;  ///< x, where it is not saved
  ConstTensor x_;
  Tensor h_;
  Tensor x8_, x_scale_, h_scale_;  ///< where operands are quantised
  Buffer routing_;
};

}  // namespace

Expected<CandidateResult> run_candidate(Context const& context, LayerData const& data,
                                        std::uint32_t poison, Alignment alignment) {
  CandidateResult result;
  Run run(context, data, poison, alignment);
  TESSERA_TRY(run.forward_calls(result));
  TESSERA_TRY(run.backward_calls(result));
  return result;
}

std::string differing_parts(CandidateResult const& a, CandidateResult const& b) {
  std::string parts;
  auto const note = [&parts](std::string const& name, bool same) {
    if (!same) parts += (parts.empty() ? "" : ", ") + name;
  };
  for (auto const& [name, values] : a.tensors) note(name, equal_bits(values, b.tensors.at(name)));
  note("h", equal_bits(a.h, b.h));
  note("topk_ids", a.choice.topk_ids == b.choice.topk_ids);
  note("unrounded_ids", a.choice.unrounded_ids == b.choice.unrounded_ids);
  note("expert_offsets", a.metadata.expert_offsets == b.metadata.expert_offsets);
  note("sort_permutation", a.metadata.sort_permutation == b.metadata.sort_permutation);
  note("gather_index", a.metadata.gather_index == b.metadata.gather_index);
  note("inverse_permutation", a.metadata.inverse_permutation == b.metadata.inverse_permutation);
  note("token_offsets", a.metadata.token_offsets == b.metadata.token_offsets);
  return parts;
}

}  // namespace tessera::verify
