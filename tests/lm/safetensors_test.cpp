// SPDX-License-Identifier: Apache-2.0
// The format's reader and writer: what was written comes back, and nothing malformed gets through.
#include "lm/safetensors.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "tests/lm/support.hpp"
#include "tests/sizes.hpp"

namespace tessera::lm {
namespace {

namespace fs = std::filesystem;

std::string file_bytes(std::string const& header, std::string const& data) {
  std::uint64_t const length = header.size();
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + header + data;
}

TEST(Safetensors, ComesBackAsWritten) {
  TemporaryFolder const folder;
  fs::path const path = folder.path() / "x.safetensors";
  std::vector<float> const a = {1, -2.5f, 3e-39f, 4, 5, 6}, b = {7};
  std::vector<TensorData> const tensors = {
      {"b \"quoted\"", {2, 3}, a}, {"a", {1}, b}, {"empty", {0}, {}}};
  write_safetensors(path, {{"format", "pt"}, {"key", "värde"}}, tensors);

  SafetensorsFile file(path);
  EXPECT_EQ(file.metadata(), (Metadata{{"format", "pt"}, {"key", "värde"}}));
  EXPECT_EQ(file.data_bytes(), 28u);
  ASSERT_EQ(file.tensors().size(), 3u);
  std::vector<float> read(6);
  std::int64_t const shape[] = {2, 3};
  file.read("b \"quoted\"", shape, read);
  EXPECT_EQ(read, a);
  EXPECT_EQ(file.read_vector("a"), b);
  EXPECT_TRUE(file.read_vector("empty").empty());
}

TEST(Safetensors, IsTheDocumentedFormat) {
  TemporaryFolder const folder;
  fs::path const path = folder.path() / "x.safetensors";
  std::vector<float> const values = {1.5f};
  std::vector<TensorData> const tensors = {{"w", {1, 1}, values}};
  write_safetensors(path, {}, tensors);
  std::string header = R"({"w":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}})";
  header.append((8 - header.size() % 8) % 8, ' ');
  std::string data(4, '\0');
  std::memcpy(data.data(), values.data(), 4);
  EXPECT_EQ(read_text(path), file_bytes(header, data));
}

TEST(Safetensors, HeadersOfManyTensors) {
  constexpr std::int64_t kTensors = size_of_test(200'000, 20'000);
  std::vector<TensorEntry> entries;
  for (std::int64_t i = 0; i < kTensors; ++i) {
    auto const begin = static_cast<std::uint64_t>(4 * i);
    entries.push_back({"w" + std::to_string(i), "F32", {1}, begin, begin + 4});
  }
  std::string const header = safetensors_header({{"format", "pt"}}, entries);
  SafetensorsHeader const parsed = parse_safetensors_header(header, 4 * kTensors);
  ASSERT_EQ(parsed.tensors.size(), entries.size());
  EXPECT_EQ(parsed.tensors.back().name, entries.back().name);
  EXPECT_EQ(parsed.metadata.at("format"), "pt");
}

struct Malformed {
  char const* what;
  std::string header;
  std::uint64_t data_bytes;
};

void PrintTo(Malformed const& malformed, std::ostream* stream) { *stream << malformed.what; }

class MalformedHeader : public testing::TestWithParam<Malformed> {};

TEST_P(MalformedHeader, IsRefused) {
  EXPECT_THROW(parse_safetensors_header(GetParam().header, GetParam().data_bytes), InputError);
}

std::string entry(std::string const& dtype, std::string const& shape, std::string const& offsets) {
  return "{\"w\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets +
         "}}";
}

INSTANTIATE_TEST_SUITE_P(
    Cases, MalformedHeader,
    testing::Values(
        Malformed{"empty", "", 0}, Malformed{"not JSON", "{\"w\":", 0},
        Malformed{"not an object", "[1]", 0}, Malformed{"not UTF-8", "{\"\xff\":1}", 0},
        Malformed{"entry not an object", "{\"w\":3}", 0},
        Malformed{"deep", std::string(100000, '['), 0},
        Malformed{"deep in the shape", entry("F32", "[[[[[1]]]]]", "[0,4]"), 4},
        Malformed{"unknown dtype", entry("F33", "[1]", "[0,4]"), 4},
        Malformed{"dtype not text", R"({"w":{"dtype":1,"shape":[1],"data_offsets":[0,4]}})", 4},
        Malformed{"no shape", R"({"w":{"dtype":"F32","data_offsets":[0,4]}})", 4},
        Malformed{"negative extent", entry("F32", "[-1]", "[0,4]"), 4},
        Malformed{"fractional extent", entry("F32", "[1.5]", "[0,4]"), 4},
        Malformed{"extent beyond the file", entry("F32", "[1000000]", "[0,4]"), 4},
        Malformed{"product overflows", entry("F32", "[4294967296,4294967296]", "[0,0]"),
                  1ull << 40},
        Malformed{"extent beyond 64 bits", entry("F32", "[99999999999999999999999]", "[0,4]"), 4},
        Malformed{"rank 9", entry("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4},
        Malformed{"offsets reversed", entry("F32", "[1]", "[4,0]"), 4},
        Malformed{"offset beyond the file", entry("F32", "[1]", "[4,8]"), 4},
        Malformed{"offsets too few", entry("F32", "[1]", "[0]"), 4},
        Malformed{"size does not match", entry("F32", "[2]", "[0,4]"), 4},
        Malformed{"a tail", entry("F32", "[1]", "[0,4]"), 8},
        Malformed{"a gap", entry("F32", "[1]", "[4,8]"), 8},
        Malformed{"an overlap",
                  R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                  R"("b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
                  4},
        Malformed{"a name twice",
                  R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                  R"("a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                  8},
        Malformed{"metadata not text", R"({"__metadata__":{"k":1}})", 0}));

/// The error of a header, empty where there is none.
std::string error_of(std::string const& header, std::uint64_t data_bytes) {
  try {
    (void)parse_safetensors_header(header, data_bytes);
  } catch (InputError const& error) {
    return error.what();
  }
  return {};
}

// Sums, products and signs of what follows rely on this limit: a tensor without elements has the right size whatever
// its other extent is, and an extent of 2^63 would be negative.
TEST(SafetensorsHeader, OffsetsAndExtentsEndWithTheData) {
  EXPECT_EQ(error_of(entry("U8", "[4]", "[0,4]"), 4), "");
  EXPECT_EQ(error_of(entry("U8", "[5]", "[0,4]"), 4),
            "tensor w: offset or extent 5 is not in [0, 4]");
  EXPECT_EQ(error_of(entry("U8", "[4]", "[0,5]"), 4),
            "tensor w: offset or extent 5 is not in [0, 4]");
  EXPECT_EQ(error_of(entry("U8", "[4]", "[5,9]"), 4),
            "tensor w: offset or extent 5 is not in [0, 4]");
  std::string const full = R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                           R"("w":{"dtype":"U8","shape":[0,EXTENT],"data_offsets":[4,4]}})";
  auto const with = [&full](std::string const& extent) {
    return std::string(full).replace(full.find("EXTENT"), 6, extent);
  };
  EXPECT_EQ(error_of(with("4"), 4), "");
  for (std::string const extent : {"5", "9223372036854775808", "18446744073709551615"}) {
    EXPECT_EQ(error_of(with(extent), 4),
              "tensor w: offset or extent " + extent + " is not in [0, 4]");
  }
}

class MalformedFile : public testing::Test {
 protected:
  void refused(std::string const& bytes) {
    write_text(path_, bytes);
    EXPECT_THROW(SafetensorsFile{path_}, InputError) << bytes.size() << " bytes";
  }
  TemporaryFolder folder_;
  fs::path path_ = folder_.path() / "x.safetensors";
};

TEST_F(MalformedFile, AtEveryLengthIsRefused) {
  std::string const whole = file_bytes(entry("F32", "[2]", "[0,8]"), std::string(8, '\0'));
  for (std::size_t length = 0; length < whole.size(); ++length) refused(whole.substr(0, length));
  refused(whole + "x");
  write_text(path_, whole);
  EXPECT_NO_THROW(SafetensorsFile{path_});
}

TEST_F(MalformedFile, WithAHugeHeaderLengthIsRefused) {
  refused(std::string(8, '\xff') + "{}");
  refused(std::string(7, '\0') + "\x7f{}");
}

TEST_F(MalformedFile, ThatIsNoFileIsRefused) {
  EXPECT_THROW(SafetensorsFile{folder_.path()}, InputError);
  EXPECT_THROW(SafetensorsFile{folder_.path() / "missing"}, InputError);
}

TEST_F(MalformedFile, OtherTypesShapesNamesAndNonFiniteValuesAreNotRead) {
  float const values[] = {1, std::numeric_limits<float>::quiet_NaN()};
  std::string data(sizeof values, '\0');
  std::memcpy(data.data(), values, sizeof values);
  write_text(path_, file_bytes(entry("F32", "[2]", "[0,8]"), data));
  SafetensorsFile file(path_);
  EXPECT_THROW((void)file.read_vector("w"), InputError);  // NaN
  EXPECT_THROW((void)file.read_vector("v"), InputError);  // no such tensor
  std::vector<float> two(2);
  std::int64_t const shape[] = {1, 2};
  EXPECT_THROW(file.read("w", shape, two), InputError);
  write_text(path_, file_bytes(entry("I64", "[1]", "[0,8]"), std::string(8, '\0')));
  SafetensorsFile integers(path_);
  EXPECT_THROW((void)integers.read_vector("w"), InputError);
}

}  // namespace
}  // namespace tessera::lm
