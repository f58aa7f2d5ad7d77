// SPDX-License-Identifier: Apache-2.0
#include "huggingface/conversion_file.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include "lm/error.hpp"
#include "lm/files.hpp"
#include "lm/json.hpp"
#include "tessera/names.hpp"

namespace tessera::huggingface {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

namespace {

constexpr std::size_t kMaxBytes = 1 << 28;
constexpr int kFormat = 1;

ordered_json describe(ExpertForm const& form) {
  return {{"naming", naming_name(form.naming)}, {"layout", layout_name(form.layout)}};
}

json const& member(json const& object, char const* key) {
  auto const found = object.is_object() ? object.find(key) : object.end();
  if (!object.is_object() || found == object.end()) {
    throw lm::InputError(fmt::format("{} is missing", key));
  }
  return *found;
}

ExpertForm form_of(json const& object) {
  auto const naming = naming_named(lm::json_string(object, "naming"));
  auto const layout = layout_named(lm::json_string(object, "layout"));
  if (!naming || !layout) throw lm::InputError("naming or layout is not known");
  return {*naming, *layout};
}

Conversion conversion_of(json const& object) {
  lm::json_integer(object, "format", kFormat, kFormat);
  Conversion conversion{form_of(member(object, "now")), form_of(member(object, "before")), {}, {}};
  if (object.contains("index")) conversion.index = lm::json_string(object, "index");
  json const& files = member(object, "files");
  if (!files.is_array() || files.empty()) throw lm::InputError("files must be a list");
  std::set<std::string> names;
  for (json const& file : files) {
    std::string const name = lm::json_string(file, "name");
    if (name.find('/') != std::string::npos || !name.ends_with(".safetensors")) {
      throw lm::InputError(fmt::format("file \"{}\": must be a .safetensors file of the folder",
                                       lm::printable(name)));
    }
    if (!names.insert(name).second) {
      throw lm::InputError(fmt::format("file \"{}\": stands there twice", lm::printable(name)));
    }
    conversion.files.push_back({name, lm::json_string(file, "header")});
  }
  return conversion;
}

}  // namespace

std::string to_text(Conversion const& conversion) {
  ordered_json object = {{"format", kFormat},
                         {"now", describe(conversion.now)},
                         {"before", describe(conversion.before)}};
  if (conversion.index) object["index"] = *conversion.index;
  object["files"] = ordered_json::array();
  for (Conversion::File const& file : conversion.files) {
    object["files"].push_back({{"name", file.name}, {"header", file.header}});
  }
  return object.dump(1) + "\n";
}

std::optional<Conversion> load_conversion(fs::path const& folder) {
  fs::path const path = folder / kConversionFile;
  if (std::error_code error; !fs::exists(path, error)) return std::nullopt;
  std::string const text = lm::read_file(path, kMaxBytes);
  try {
    return conversion_of(lm::parse_json(text, kConversionFile));
  } catch (lm::InputError const& error) {
    throw lm::InputError(fmt::format("{}: {}", path.string(), error.what()));
  }
}

}  // namespace tessera::huggingface
