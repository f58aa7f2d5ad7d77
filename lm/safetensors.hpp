// SPDX-License-Identifier: Apache-2.0
// The safetensors format:
//   8 bytes    N, little-endian: length of the header
//   N bytes    JSON {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...,
//              "__metadata__": {"key": "text", ...}}, padded with spaces to a multiple of 8
//   the rest   the tensors' bytes; offsets count from here, without gaps or overlaps
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::lm {

using Metadata = std::map<std::string, std::string>;

struct TensorEntry {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  ///< in the data section
};

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;  ///< in the order of their data
  Metadata metadata;
};

/// Checks the whole header against the size of the data section. Throws InputError.
SafetensorsHeader parse_safetensors_header(std::string_view json, std::uint64_t data_bytes);

/// The header that these entries make, padded. Entries stand in the order of their data.
std::string safetensors_header(Metadata const& metadata, std::span<TensorEntry const> tensors);

/// Bytes of an element of that type ("BF16"). Throws InputError for a type that is not known.
std::uint64_t element_bytes(std::string_view dtype);

/// A fp32 tensor to be written.
struct TensorData {
  std::string name;
  std::vector<std::int64_t> shape;
  std::span<float const> values;
};

void write_safetensors(std::filesystem::path const& path, Metadata const& metadata,
                       std::span<TensorData const> tensors);

/// A file whose header was read and checked; nothing larger than the header is allocated.
class SafetensorsFile {
 public:
  /// Throws InputError with the file's name for anything that is not well-formed.
  explicit SafetensorsFile(std::filesystem::path const& path);

  [[nodiscard]] Metadata const& metadata() const noexcept { return header_.metadata; }
  [[nodiscard]] std::vector<TensorEntry> const& tensors() const noexcept { return header_.tensors; }
  [[nodiscard]] std::uint64_t data_bytes() const noexcept { return data_bytes_; }
  /// The header as it stands in the file.
  [[nodiscard]] std::string const& header_text() const noexcept { return header_text_; }

  /// `bytes.size()` bytes of any tensor of this file, from its byte `offset` on.
  void read_bytes(TensorEntry const& tensor, std::uint64_t offset, std::span<std::byte> bytes);

  /// An F32 tensor of one dimension, whatever its length; every value must be finite.
  [[nodiscard]] std::vector<float> read_vector(std::string_view name);
  /// Reads an F32 tensor of exactly this shape; every value must be finite.
  void read(std::string_view name, std::span<std::int64_t const> shape, std::span<float> values);

 private:
  [[nodiscard]] TensorEntry const& find(std::string_view name) const;
  void read_values(TensorEntry const& tensor, std::span<float> values);

  std::filesystem::path path_;
  std::ifstream file_;
  std::uint64_t data_begin_ = 0, data_bytes_ = 0;
  std::string header_text_;
  SafetensorsHeader header_;
  std::map<std::string, std::size_t, std::less<>> positions_;  // of names in header_.tensors
};

}  // namespace tessera::lm
