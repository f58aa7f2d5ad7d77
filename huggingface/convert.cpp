// SPDX-License-Identifier: Apache-2.0
// The conversion: first its plan, then the bytes, tensor by tensor.
#include "huggingface/convert.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <span>
#include <utility>

#include "huggingface/config_check.hpp"
#include "huggingface/conversion_plan.hpp"
#include "huggingface/new_folder.hpp"
#include "huggingface/quantised.hpp"
#include "lm/checkpoint.hpp"
#include "lm/error.hpp"
#include "lm/files.hpp"
#include "tessera/names.hpp"

namespace tessera::huggingface {

namespace fs = std::filesystem;

namespace {

constexpr std::size_t kCopyBytes = 1 << 23;

struct Stopped {};

class Writer {
 public:
  Writer(CheckpointFolder& checkpoint, ExpertGroups& groups, ConversionPlan const& plan,
         ConvertOptions const& options)
      : checkpoint_(checkpoint), groups_(groups), plan_(plan), options_(options) {
    for (OutputFile const& file : plan.files) {
      if (!file.tensors.empty()) total_ += file.tensors.back().entry.end;
    }
  }

  [[nodiscard]] std::uint64_t total() const noexcept { return total_; }

  void write(fs::path const& folder) {
    for (OutputFile const& file : plan_.files) {
      lm::AtomicFile target(folder / file.name);
      std::uint64_t const length = file.header.size();
      target.write(std::as_bytes(std::span(&length, 1)));
      target.write(std::as_bytes(std::span(file.header)));
      for (Output const& output : file.tensors) {
        output.expert ? make(*output.expert, target) : copy(output.source, target);
      }
      target.rename_into_place();
    }
    if (plan_.index) lm::write_atomically(folder / lm::kIndexFile, *plan_.index);
    if (plan_.conversion) lm::write_atomically(folder / kConversionFile, *plan_.conversion);
    for (std::string const& name : checkpoint_.companions()) {
      if (name != kConversionFile) copy_file(checkpoint_.path() / name, folder / name);
    }
  }

 private:
  void put(lm::AtomicFile& target, ConstBytes bytes) {
    if (options_.stop != nullptr && options_.stop->load()) throw Stopped{};
    target.write(bytes);
    done_ += bytes.size();
    if (options_.report) options_.report(done_, total_);
  }

  void copy(std::string const& name, lm::AtomicFile& target) {
    StoredTensor const& tensor = *checkpoint_.find(name);
    std::uint64_t const bytes = tensor.entry->end - tensor.entry->begin;
    for (std::uint64_t at = 0; at < bytes; at += kCopyBytes) {
      buffer_.resize(std::min<std::uint64_t>(kCopyBytes, bytes - at));
      checkpoint_.read(tensor, at, buffer_);
      put(target, buffer_);
    }
  }

  void make(ExpertTensor const& tensor, lm::AtomicFile& target) {
    ExpertGroup const& group = groups_.group(tensor.prefix);
    bool const all = tensor.expert < 0;
    std::int64_t const first = all ? 0 : tensor.expert, last = all ? group.experts : first + 1;
    for (std::int64_t e = first; e < last; ++e) put(target, block(group, tensor, e));
  }

  // `tensor`'s bytes of one expert in the new layout.
  ConstBytes block(ExpertGroup const& group, ExpertTensor const& tensor, std::int64_t expert) {
    WeightLayout layout = plan_.form.layout;
    if (tensor.bias) layout.orientation = WeightOrientation::rows;  // one column either way
    if (tensor.part != Part::gate_up) {
      ConstBytes const matrix = groups_.matrix(group, tensor.part, tensor.bias, expert);
      if (layout.orientation != WeightOrientation::transposed) return matrix;
      buffer_.resize(matrix.size());
      bool const down = tensor.part == Part::down;
      transpose(down ? group.hidden : group.intermediate, down ? group.intermediate : group.hidden,
                lm::element_bytes(group.dtype), matrix, buffer_);
      return buffer_;
    }
    BlockShape const shape{group.intermediate, tensor.bias ? 1 : group.hidden,
                           lm::element_bytes(group.dtype)};
    ConstBytes const gate = groups_.matrix(group, Part::gate, tensor.bias, expert);
    gate_.assign(gate.begin(), gate.end());
    ConstBytes const up = groups_.matrix(group, Part::up, tensor.bias, expert);
    buffer_.resize(2 * shape.matrix_bytes());
    pack_gate_up(shape, layout, gate_, up, buffer_);
    return buffer_;
  }

  void copy_file(fs::path const& from, fs::path const& to) {
    std::ifstream source(from, std::ios::binary);
    lm::AtomicFile target(to);
    buffer_.resize(kCopyBytes);
    while (source.read(reinterpret_cast<char*>(buffer_.data()),
                       static_cast<std::streamsize>(buffer_.size())),
           source.gcount() > 0) {
      target.write(ConstBytes(buffer_).first(static_cast<std::size_t>(source.gcount())));
    }
    if (!source.eof()) throw lm::InputError(fmt::format("{}: cannot be read", from.string()));
    target.rename_into_place();
  }

  CheckpointFolder& checkpoint_;
  ExpertGroups& groups_;
  ConversionPlan const& plan_;
  ConvertOptions const& options_;
  std::uint64_t done_ = 0, total_ = 0;
  std::vector<std::byte> buffer_, gate_;
};

std::string form_name(ExpertForm const& form) {
  return form.naming == Naming::tessera ? layout_name(form.layout) : "huggingface";
}

std::vector<std::string> files_of(ConversionPlan const& plan, CheckpointFolder const& checkpoint) {
  std::vector<std::string> names;
  for (OutputFile const& file : plan.files) names.push_back(file.name);
  if (plan.index) names.emplace_back(lm::kIndexFile);
  if (plan.conversion) names.emplace_back(kConversionFile);
  for (std::string const& name : checkpoint.companions()) {
    if (name != kConversionFile) names.push_back(name);
  }
  return names;
}

}  // namespace

ConvertSummary convert(ConvertOptions const& options) {
  CheckpointFolder checkpoint(options.from);
  refuse_quantised(checkpoint);
  std::optional<Conversion> const conversion = load_conversion(options.from);
  ExpertGroups groups(checkpoint, source_form(checkpoint, conversion));
  if (groups.groups().empty()) {
    throw lm::InputError(fmt::format("{}: no expert weights under the names of {}",
                                     options.from.string(), naming_name(groups.form().naming)));
  }
  check_against_config(checkpoint, groups);
  ConversionPlan const plan = plan_conversion(checkpoint, groups, conversion, options);
  Writer writer(checkpoint, groups, plan, options);

  ConvertSummary summary{.from_layout = form_name(groups.form()),
                         .to_layout = form_name(plan.form),
                         .moe_layers = groups.groups().size(),
                         .bytes = writer.total(),
                         .files = files_of(plan, checkpoint),
                         .left_behind = checkpoint.left_behind()};
  for (OutputFile const& file : plan.files) summary.tensors += file.tensors.size();
  NewFolder folder(options.to);
  folder.require_space(writer.total());
  try {
    writer.write(folder.path());
  } catch (Stopped const&) {
    summary.stopped = true;
    return summary;
  }
  folder.take_place();
  return summary;
}

}  // namespace tessera::huggingface
