// SPDX-License-Identifier: Apache-2.0
#include "lm/safetensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <system_error>
#include <utility>

#include "lm/error.hpp"
#include "lm/files.hpp"
#include "lm/json.hpp"
#include "lm/text.hpp"

namespace tessera::lm {

namespace fs = std::filesystem;
using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

std::uint64_t element_bytes(std::string_view dtype) {
  constexpr std::pair<std::string_view, std::uint64_t> kBytes[] = {
      {"BOOL", 1}, {"U8", 1},      {"I8", 1},      {"U16", 2},    {"I16", 2}, {"F16", 2},
      {"BF16", 2}, {"U32", 4},     {"I32", 4},     {"F32", 4},    {"U64", 8}, {"I64", 8},
      {"F64", 8},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}};
  for (auto const& [name, bytes] : kBytes) {
    if (name == dtype) return bytes;
  }
  throw InputError(fmt::format("dtype {} is unknown", printable(dtype)));
}

namespace {

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // as the format's own library
constexpr std::size_t kMaxRank = 8;

std::uint64_t as_offset(json const& value, std::uint64_t largest) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > largest) {
    throw InputError(fmt::format(
        "offset or extent {} is not in [0, {}]",
        printable(value.dump(-1, ' ', false, json::error_handler_t::replace)), largest));
  }
  return value.get<std::uint64_t>();
}

json const& array_member(json const& object, char const* key) {
  auto const found = object.find(key);
  if (found == object.end() || !found->is_array()) {
    throw InputError(fmt::format("{} is missing or not an array", key));
  }
  return *found;
}

TensorEntry parse_entry(std::string const& name, json const& object, std::uint64_t data_bytes) {
  if (!object.is_object()) throw InputError("the entry is not an object");
  TensorEntry tensor{.name = name, .dtype = json_string(object, "dtype"), .shape = {}};
  std::uint64_t bytes = element_bytes(tensor.dtype);
  json const& shape = array_member(object, "shape");
  if (shape.size() > kMaxRank)
    throw InputError(fmt::format("rank {} > {}", shape.size(), kMaxRank));
  bool empty = false;
  for (json const& extent : shape) {
    // Extents within the data keep the product below 2^128; it is cut at every step.
    std::uint64_t const value = as_offset(extent, data_bytes);
    tensor.shape.push_back(static_cast<std::int64_t>(value));
    empty = empty || value == 0;
    bytes = empty ? 0 : (bytes > data_bytes / value ? data_bytes + 1 : bytes * value);
  }
  json const& offsets = array_member(object, "data_offsets");
  if (offsets.size() != 2) throw InputError("data_offsets must be [begin, end]");
  tensor.begin = as_offset(offsets[0], data_bytes);
  tensor.end = as_offset(offsets[1], data_bytes);
  if (tensor.begin > tensor.end || tensor.end - tensor.begin != bytes) {
    throw InputError(fmt::format("data_offsets [{}, {}] do not match dtype {} and shape [{}]",
                                 tensor.begin, tensor.end, tensor.dtype,
                                 joined(tensor.shape, ", ")));
  }
  return tensor;
}

Metadata parse_metadata(json const& object) {
  if (!object.is_object()) throw InputError("__metadata__ is not an object");
  Metadata metadata;
  for (auto const& [key, value] : object.items()) metadata[key] = json_string(object, key.c_str());
  return metadata;
}

void check_contiguous(std::vector<TensorEntry> const& tensors, std::uint64_t data_bytes) {
  std::uint64_t expected = 0;
  for (TensorEntry const& tensor : tensors) {
    if (tensor.begin != expected) {
      throw InputError(fmt::format("tensor {} begins at byte {} instead of {}: {}",
                                   printable(tensor.name), tensor.begin, expected,
                                   tensor.begin < expected ? "an overlap" : "a gap"));
    }
    expected = tensor.end;
  }
  if (expected != data_bytes) {
    throw InputError(fmt::format("the tensors take {} bytes, the file holds {}; is it cut off?",
                                 expected, data_bytes));
  }
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view text, std::uint64_t data_bytes) {
  json const object = parse_json(text, "header", 4);
  if (!object.is_object()) throw InputError("the header is not a JSON object");
  SafetensorsHeader header;
  for (auto const& [name, value] : object.items()) {
    if (name == "__metadata__") {
      header.metadata = parse_metadata(value);
      continue;
    }
    try {
      header.tensors.push_back(parse_entry(name, value, data_bytes));
    } catch (InputError const& error) {
      throw InputError(fmt::format("tensor {}: {}", printable(name), error.what()));
    }
  }
  std::stable_sort(header.tensors.begin(), header.tensors.end(),
                   [](TensorEntry const& a, TensorEntry const& b) {
                     return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
                   });
  check_contiguous(header.tensors, data_bytes);
  return header;
}

std::string safetensors_header(Metadata const& metadata, std::span<TensorEntry const> tensors) {
  // Entry by entry, as their data stand: an ordered object would compare every name with every other.
  std::string text = "{";
  auto const add = [&text](std::string const& name, nlohmann::ordered_json const& value) {
    text += (text.size() > 1 ? "," : "") + json(name).dump() + ":" + value.dump();
  };
  if (!metadata.empty()) add("__metadata__", metadata);
  for (TensorEntry const& tensor : tensors) {
    add(tensor.name, {{"dtype", tensor.dtype},
                      {"shape", tensor.shape},
                      {"data_offsets", {tensor.begin, tensor.end}}});
  }
  text += "}";
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes, ' ');
  return text;
}

void write_safetensors(fs::path const& path, Metadata const& metadata,
                       std::span<TensorData const> tensors) {
  std::vector<TensorEntry> entries;
  std::uint64_t offset = 0;
  for (TensorData const& tensor : tensors) {
    std::uint64_t const end = offset + tensor.values.size_bytes();
    entries.push_back({tensor.name, "F32", tensor.shape, offset, end});
    offset = end;
  }
  std::string const header = safetensors_header(metadata, entries);
  std::uint64_t const length = header.size();
  std::vector<std::span<std::byte const>> pieces;
  pieces.push_back(std::as_bytes(std::span(&length, 1)));
  pieces.push_back(std::as_bytes(std::span(header)));
  for (TensorData const& tensor : tensors) pieces.push_back(std::as_bytes(tensor.values));
  write_atomically(path, pieces);
}

SafetensorsFile::SafetensorsFile(fs::path const& path) : path_(path) {
  std::error_code error;
  std::uint64_t const bytes = fs::is_regular_file(path, error) ? fs::file_size(path, error) : 0;
  file_.open(path, std::ios::binary);
  if (error || !file_ || !fs::is_regular_file(path, error)) {
    throw InputError(fmt::format("{}: no such file, or not readable", path.string()));
  }
  std::uint64_t length = 0;
  if (bytes < kLengthBytes || !file_.read(reinterpret_cast<char*>(&length), kLengthBytes)) {
    throw InputError(fmt::format("{}: {} bytes are too few for safetensors", path.string(), bytes));
  }
  if (length > std::min(bytes - kLengthBytes, kMaxHeaderBytes)) {
    throw InputError(fmt::format("{}: header of {} bytes in a file of {}; is it safetensors?",
                                 path.string(), length, bytes));
  }
  header_text_.resize(length);
  if (!file_.read(header_text_.data(), static_cast<std::streamsize>(length))) {
    throw InputError(fmt::format("{}: cannot be read", path.string()));
  }
  data_begin_ = kLengthBytes + length;
  data_bytes_ = bytes - data_begin_;
  try {
    header_ = parse_safetensors_header(header_text_, data_bytes_);
  } catch (InputError const& failure) {
    throw InputError(fmt::format("{}: {}", path.string(), failure.what()));
  }
  for (TensorEntry const& tensor : header_.tensors) {
    positions_.emplace(tensor.name, positions_.size());
  }
}

TensorEntry const& SafetensorsFile::find(std::string_view name) const {
  auto const found = positions_.find(name);
  if (found == positions_.end()) {
    throw InputError(fmt::format("{}: tensor {} is missing", path_.string(), name));
  }
  TensorEntry const& tensor = header_.tensors[found->second];
  if (tensor.dtype != "F32") {
    throw InputError(
        fmt::format("{}: tensor {} is {}; only F32 is read", path_.string(), name, tensor.dtype));
  }
  return tensor;
}

void SafetensorsFile::read_bytes(TensorEntry const& tensor, std::uint64_t offset,
                                 std::span<std::byte> bytes) {
  file_.clear();
  file_.seekg(static_cast<std::streamoff>(data_begin_ + tensor.begin + offset));
  if (!file_.read(reinterpret_cast<char*>(bytes.data()),
                  static_cast<std::streamsize>(bytes.size()))) {
    throw InputError(
        fmt::format("{}: tensor {} cannot be read", path_.string(), printable(tensor.name)));
  }
}

void SafetensorsFile::read_values(TensorEntry const& tensor, std::span<float> values) {
  read_bytes(tensor, 0, std::as_writable_bytes(values));
  if (!std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); })) {
    throw InputError(
        fmt::format("{}: tensor {} holds NaN or infinity", path_.string(), tensor.name));
  }
}

std::vector<float> SafetensorsFile::read_vector(std::string_view name) {
  TensorEntry const& tensor = find(name);
  if (tensor.shape.size() != 1) {
    throw InputError(fmt::format("{}: tensor {} must have one dimension", path_.string(), name));
  }
  std::vector<float> values(static_cast<std::size_t>(tensor.shape[0]));
  read_values(tensor, values);
  return values;
}

void SafetensorsFile::read(std::string_view name, std::span<std::int64_t const> shape,
                           std::span<float> values) {
  TensorEntry const& tensor = find(name);
  if (!std::equal(shape.begin(), shape.end(), tensor.shape.begin(), tensor.shape.end())) {
    throw InputError(fmt::format("{}: tensor {} has shape [{}], not [{}]", path_.string(), name,
                                 joined(tensor.shape, ", "), joined(shape, ", ")));
  }
  read_values(tensor, values);
}

}  // namespace tessera::lm
