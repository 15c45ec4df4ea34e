#include "loader/safetensors.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "loader/test_folder.h"

namespace dlo {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

// A file's bytes: header length (that of `header` unless given), header, `data_bytes` bytes of
// data.
std::string FileText(const std::string& header, size_t data_bytes,
                     std::optional<uint64_t> length = std::nullopt) {
  uint64_t n = length.value_or(header.size());
  std::string text(8, '\0');
  std::memcpy(text.data(), &n, 8);
  return text + header + std::string(data_bytes, 'd');
}

absl::StatusOr<SafetensorsHeader> Parse(const std::string& text) {
  return ParseSafetensorsHeader(
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(text.data()), text.size()),
      static_cast<int64_t>(text.size()), "weights.safetensors");
}

struct BadFile {
  const char* name;
  std::string text;
  std::vector<std::string> message_parts;  // each must be in the message, besides the file's name
};

std::string Tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return absl::StrCat(R"({"dtype":)", dtype, R"(,"shape":)", shape, R"(,"data_offsets":)", offsets,
                      "}");
}

// A header with one tensor "a".
std::string OneTensor(const std::string& dtype, const std::string& shape,
                      const std::string& offsets) {
  return absl::StrCat(R"({"a":)", Tensor(dtype, shape, offsets), "}");
}

std::vector<BadFile> BadFiles() {
  const std::string good = OneTensor(R"("F32")", "[2]", "[0,8]");
  const std::string a = R"("a":)" + Tensor(R"("U8")", "[4]", "[0,4]");
  std::string deep = R"({"a":)" + std::string(100000, '[');
  std::string many_dims = "[";
  for (int i = 0; i < 65; ++i) many_dims += i == 0 ? "1" : ",1";
  many_dims += "]";
  return {
      {"seven_bytes", std::string(7, '\0'), {"7 bytes", "too short"}},
      {"length_zero", FileText("", 4, 0), {"header length is 0"}},
      {"length_beyond_file", FileText(good, 8, 4000), {"4000", "beyond the file", "truncated"}},
      {"length_over_100_mb", FileText(good, 8, 100'000'001), {"100000001", "100 MB"}},
      {"length_all_ones", FileText(good, 8, UINT64_MAX), {"18446744073709551615", "100 MB"}},
      {"length_wraps_when_8_is_added", FileText(good, 8, UINT64_MAX - 4), {"100 MB"}},
      {"header_cut_short", FileText(good.substr(0, 20), 0), {"invalid JSON"}},
      {"starts_with_blank", FileText(" " + good, 8), {"starts with \" \""}},
      {"starts_with_byte_order_mark", FileText("\xEF\xBB\xBF" + good, 8), {"starts with"}},
      {"header_is_array", FileText("[]", 0), {"starts with \"[\""}},
      {"header_is_binary", FileText("\x80\x02}q\x01", 0), {"starts with"}},
      {"json_broken", FileText(R"({"a":})", 0), {"invalid JSON"}},
      {"json_trailing_text", FileText(good + "x", 8), {"invalid JSON"}},
      {"json_second_value", FileText(good + "{}", 8), {"invalid JSON"}},
      {"json_nul_and_more", FileText(good + std::string("\0{", 2), 8), {"NUL byte"}},
      {"json_not_utf8", FileText("{\"\xC3\x28\":1}", 0), {"invalid JSON"}},
      {"json_too_deep", FileText(deep, 0), {"expected an object of tensor \"a\"", "an array"}},
      {"tensor_is_number", FileText(R"({"a":3})", 0), {"tensor \"a\"", "the number 3"}},
      {"tensor_is_null", FileText(R"({"a":null})", 0), {"tensor \"a\"", "null"}},
      {"tensor_is_empty", FileText(R"({"a":{}})", 0), {"no dtype of tensor \"a\""}},
      {"no_shape", FileText(R"({"a":{"dtype":"F32"}})", 0), {"no shape of tensor \"a\""}},
      {"no_offsets", FileText(R"({"a":{"dtype":"F32","shape":[]}})", 0), {"no data_offsets"}},
      {"unknown_key", FileText(R"({"a":{"strides":[1]}})", 0), {"\"strides\"", "tensor \"a\""}},
      {"dtype_number", FileText(OneTensor("1", "[2]", "[0,8]"), 8), {"string as dtype", "\"a\""}},
      {"dtype_unknown", FileText(OneTensor(R"("F33")", "[2]", "[0,8]"), 8), {"\"F33\"", "\"a\""}},
      {"dtype_lower_case", FileText(OneTensor(R"("f32")", "[2]", "[0,8]"), 8), {"\"f32\""}},
      {"shape_object",
       FileText(OneTensor(R"("F32")", "{}", "[0,8]"), 8),
       {"shape of tensor \"a\""}},
      {"shape_negative", FileText(OneTensor(R"("F32")", "[-2]", "[0,8]"), 8), {"-2", "\"a\""}},
      {"shape_float", FileText(OneTensor(R"("F32")", "[2.0]", "[0,8]"), 8), {"\"2.0\"", "\"a\""}},
      {"shape_exponent", FileText(OneTensor(R"("F32")", "[2e0]", "[0,8]"), 8), {"\"2e0\""}},
      {"shape_string", FileText(OneTensor(R"("F32")", R"(["2"])", "[0,8]"), 8), {"\"2\"", "\"a\""}},
      {"shape_nested", FileText(OneTensor(R"("F32")", "[[2]]", "[0,8]"), 8), {"an array", "\"a\""}},
      {"shape_over_int64",
       FileText(OneTensor(R"("F32")", "[9223372036854775808]", "[0,8]"), 8),
       {"9223372036854775808", "\"a\""}},
      {"shape_over_uint64",
       FileText(OneTensor(R"("F32")", "[99999999999999999999]", "[0,8]"), 8),
       {"99999999999999999999"}},
      {"shape_65_dimensions",
       FileText(OneTensor(R"("U8")", many_dims, "[0,1]"), 1),
       {"at most 64"}},
      {"product_overflows",
       FileText(OneTensor(R"("U8")", "[4294967296,4294967296]", "[0,0]"), 0),
       {"overflows", "\"a\""}},
      {"product_overflows_before_zero",
       FileText(OneTensor(R"("U8")", "[4294967296,4294967296,0]", "[0,0]"), 0),
       {"overflows"}},
      {"bytes_overflow_by_dtype",
       FileText(OneTensor(R"("F64")", "[2305843009213693952]", "[0,0]"), 0),
       {"overflows", "\"a\""}},
      {"offsets_one", FileText(OneTensor(R"("F32")", "[2]", "[8]"), 8), {"two", "\"a\""}},
      {"offsets_three", FileText(OneTensor(R"("F32")", "[2]", "[0,8,8]"), 8), {"two", "\"a\""}},
      {"offsets_negative", FileText(OneTensor(R"("F32")", "[2]", "[-8,0]"), 8), {"-8", "\"a\""}},
      {"offsets_backwards",
       FileText(OneTensor(R"("F32")", "[2]", "[8,0]"), 8),
       {"[8, 0]", "\"a\""}},
      {"offsets_past_end",
       FileText(OneTensor(R"("F32")", "[2]", "[0,8]"), 7),
       {"beyond the 7", "\"a\""}},
      {"offsets_int64_max",
       FileText(OneTensor(R"("F32")", "[2]", "[9223372036854775799,9223372036854775807]"), 8),
       {"beyond the 8", "\"a\""}},
      {"range_too_small",
       FileText(OneTensor(R"("F32")", "[3]", "[0,8]"), 8),
       {"12 bytes", "span 8", "\"a\""}},
      {"range_too_large", FileText(OneTensor(R"("F16")", "[3]", "[0,8]"), 8), {"6 bytes", "\"a\""}},
      {"scalar_with_no_bytes",
       FileText(OneTensor(R"("F32")", "[]", "[0,0]"), 0),
       {"4 bytes", "\"a\""}},
      {"trailing_bytes", FileText(good, 9), {"1 bytes follow", "\"a\""}},
      {"data_without_tensors", FileText("{}", 5), {"5 bytes follow"}},
      {"gap_at_start", FileText(OneTensor(R"("U8")", "[4]", "[4,8]"), 8), {"gap of 4", "\"a\""}},
      {"gap_between",
       FileText("{" + a + R"(,"b":)" + Tensor(R"("U8")", "[2]", "[6,8]") + "}", 8),
       {"gap of 2", "\"b\""}},
      {"overlap",
       FileText("{" + a + R"(,"b":)" + Tensor(R"("U8")", "[4]", "[3,7]") + "}", 7),
       {"\"b\" overlaps tensor \"a\""}},
      {"same_range_twice",
       FileText("{" + a + R"(,"b":)" + Tensor(R"("U8")", "[4]", "[0,4]") + "}", 4),
       {"\"b\" overlaps tensor \"a\""}},
      {"zero_elements_inside_another",
       FileText("{" + a + R"(,"b":)" + Tensor(R"("U8")", "[0]", "[2,2]") + "}", 4),
       {"\"b\" overlaps"}},
      {"zero_elements_past_end",
       FileText(OneTensor(R"("U8")", "[0]", "[1,1]"), 0),
       {"beyond the 0", "\"a\""}},
      {"duplicate_tensor", FileText("{" + a + "," + a + "}", 4), {"duplicate key \"a\""}},
      {"duplicate_by_escape",
       FileText("{" + a + R"(,"\u0061":)" + Tensor(R"("U8")", "[4]", "[0,4]") + "}", 4),
       {"duplicate key \"a\""}},
      {"duplicate_dtype",
       FileText(R"({"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4),
       {"duplicate key \"dtype\" of tensor \"a\""}},
      {"duplicate_shape",
       FileText(R"({"a":{"dtype":"U8","shape":[4],"shape":[4],"data_offsets":[0,4]}})", 4),
       {"duplicate key \"shape\" of tensor \"a\""}},
      {"duplicate_offsets",
       FileText(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"data_offsets":[0,4]}})", 4),
       {"duplicate key \"data_offsets\" of tensor \"a\""}},
      {"duplicate_metadata",
       FileText(R"({"__metadata__":{},"__metadata__":{}})", 0),
       {"duplicate key \"__metadata__\""}},
      {"duplicate_in_metadata",
       FileText(R"({"__metadata__":{"k":"1","k":"1"}})", 0),
       {"duplicate key \"k\" in __metadata__"}},
      {"metadata_array", FileText(R"({"__metadata__":[]})", 0), {"an object as __metadata__"}},
      {"metadata_number", FileText(R"({"__metadata__":{"k":1}})", 0), {"\"k\" in __metadata__"}},
      {"metadata_nested", FileText(R"({"__metadata__":{"k":{}}})", 0), {"\"k\" in __metadata__"}},
  };
}

class BadHeader : public ::testing::TestWithParam<BadFile> {};

TEST_P(BadHeader, IsRefusedNamingFileAndTensor) {
  absl::StatusOr<SafetensorsHeader> header = Parse(GetParam().text);
  ASSERT_FALSE(header.ok());
  EXPECT_EQ(header.status().code(), absl::StatusCode::kInvalidArgument);
  const std::string message(header.status().message());
  EXPECT_THAT(message, HasSubstr("weights.safetensors"));
  for (const std::string& part : GetParam().message_parts) EXPECT_THAT(message, HasSubstr(part));
}

// The mapped file goes the same way as the pure parser.
TEST_P(BadHeader, IsRefusedByOpen) {
  TempFolder folder;
  const std::string path = folder.Write("weights.safetensors", GetParam().text);
  absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path);
  ASSERT_FALSE(file.ok());
  EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(file.status().message()), HasSubstr(path));
}

INSTANTIATE_TEST_SUITE_P(Files, BadHeader, ::testing::ValuesIn(BadFiles()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(SafetensorsHeaderTest, AcceptsWhatTheFormatAllows) {
  const std::string u8 = R"("U8")";
  // Order of keys, white space, escapes, padding, an odd header length, zero-element tensors
  // anywhere on a boundary, a scalar.
  const std::string header =
      absl::StrCat(R"({ "b" : )", Tensor(u8, "[2, 2]", "[4, 8]"),
                   R"(, "__metadata__": {"format": "pt"}, "a\n":)",
                   R"({"data_offsets":[0,4],"dtype":"F32","shape":[]})", R"(,"e1":)",
                   Tensor(u8, "[0]", "[0,0]"), R"(,"e2":)", Tensor(u8, "[3,0]", "[4,4]"),
                   R"(,"e3":)", Tensor(u8, "[0,7]", "[8,8]"), "}\n   ");
  for (const char* padding : {"", " ", "  ", "   "}) {
    absl::StatusOr<SafetensorsHeader> parsed = Parse(FileText(header + padding, 8));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(parsed->tensors.size(), 5u);
    EXPECT_THAT(parsed->metadata, ElementsAre(Pair("format", "pt")));
    const int64_t data = 8 + static_cast<int64_t>(header.size() + strlen(padding));
    EXPECT_EQ(parsed->tensors.at("b").offset, data + 4);
    EXPECT_EQ(parsed->tensors.at("b").bytes, 4);
    EXPECT_THAT(parsed->tensors.at("b").shape, ElementsAre(2, 2));
    EXPECT_EQ(parsed->tensors.at("a\n").dtype, DType::kF32);
    EXPECT_EQ(parsed->tensors.at("a\n").bytes, 4);
    EXPECT_EQ(parsed->tensors.at("e3").offset, data + 8);
    EXPECT_EQ(parsed->tensors.at("e3").bytes, 0);
  }
  EXPECT_TRUE(Parse(FileText("{}", 0)).ok());
}

TEST(SafetensorsHeaderTest, KnowsEveryDType) {
  for (DType dtype :
       {DType::kF32, DType::kF16, DType::kBF16, DType::kF64, DType::kI64, DType::kI32, DType::kI16,
        DType::kI8, DType::kU8, DType::kBool, DType::kF8E4M3, DType::kF8E5M2}) {
    const int64_t bytes = 3 * DTypeBytes(dtype);
    auto parsed = Parse(FileText(OneTensor(absl::StrCat("\"", DTypeName(dtype), "\""), "[3]",
                                           absl::StrCat("[0,", bytes, "]")),
                                 static_cast<size_t>(bytes)));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(parsed->tensors.at("a").dtype, dtype);
  }
}

TEST(SafetensorsHeaderTest, PrefixOfAHugeFileSuffices) {
  // 1 TiB of data that does not exist: only the header is looked at.
  const std::string text =
      FileText(OneTensor(R"("U8")", "[1099511627776]", "[0,1099511627776]"), 0);
  auto parsed = ParseSafetensorsHeader(AsBytes(text),
                                       static_cast<int64_t>(text.size()) + (1LL << 40), "huge");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->tensors.at("a").bytes, 1LL << 40);
}

TEST(SafetensorsHeaderTest, MessagesStayShortAndPrintable) {
  const std::string name(5'000'000, 'n');
  auto long_name = Parse(FileText("{\"" + name + "\":1}", 0));
  EXPECT_LT(long_name.status().message().size(), 1000u);
  auto long_token = Parse(FileText("{\"" + name, 0));
  EXPECT_LT(long_token.status().message().size(), 1000u);
  auto control = Parse(FileText(R"({"\u0007\nx\u00e9":1})", 0));
  EXPECT_THAT(std::string(control.status().message()), HasSubstr("\"\\007\\nx\xC3\xA9\""));
}

TEST(SafetensorsFileTest, OpenNamesWhatIsNoFile) {
  TempFolder folder;
  auto missing = SafetensorsFile::Open(folder / "none.safetensors");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("none.safetensors"));

  fs::create_directory(folder / "dir.safetensors");
  auto directory = SafetensorsFile::Open(folder / "dir.safetensors");
  EXPECT_EQ(directory.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(directory.status().message()), HasSubstr("folder"));

  auto empty = SafetensorsFile::Open(folder.Write("empty.safetensors", ""));
  EXPECT_EQ(empty.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(empty.status().message()), HasSubstr("empty"));

  // Opening a FIFO to read would wait for a writer for ever.
  ASSERT_EQ(mkfifo((folder / "fifo").c_str(), 0600), 0);
  auto fifo = SafetensorsFile::Open(folder / "fifo");
  EXPECT_EQ(fifo.status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(SafetensorsFileTest, FollowsSymbolicLinksAndReadsPrivateFiles) {
  TempFolder folder;
  const std::string path = folder.Write("blob", FileText(OneTensor(R"("U8")", "[3]", "[0,3]"), 3));
  ASSERT_EQ(chmod(path.c_str(), 0600), 0);
  fs::create_symlink("blob", folder / "model.safetensors");
  auto file = SafetensorsFile::Open(folder / "model.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->tensors().size(), 1u);
}

TEST(SafetensorsFileTest, SpansSurviveAMove) {
  TempFolder folder;
  auto file =
      SafetensorsFile::Open(folder.Write("a", FileText(OneTensor(R"("U8")", "[3]", "[0,3]"), 3)));
  ASSERT_TRUE(file.ok()) << file.status();
  absl::Span<const std::byte> before = file->data(file->tensors().at("a"));
  SafetensorsFile moved = *std::move(file);
  absl::Span<const std::byte> after = moved.data(moved.tensors().at("a"));
  EXPECT_EQ(before.data(), after.data());
  auto other =
      SafetensorsFile::Open(folder.Write("b", FileText(OneTensor(R"("U8")", "[1]", "[0,1]"), 1)));
  ASSERT_TRUE(other.ok()) << other.status();
  *other = std::move(moved);
  EXPECT_EQ(other->data(other->tensors().at("a"))[2], std::byte{'d'});
}

TEST(SafetensorsWriterTest, WhatIsWrittenIsReadBack) {
  TempFolder folder;
  std::string floats(60, '\0');
  std::iota(floats.begin(), floats.end(), 0);
  const std::string halves = "\x01\x02";
  const std::string quoted = "quote\" back\\ tab\t \xC3\xA9";
  const std::vector<SafetensorsTensor> tensors = {
      {"z", DType::kF32, {3, 5}, AsBytes(floats)},
      {quoted, DType::kBF16, {}, AsBytes(halves)},
      {"none", DType::kI64, {4, 0}, {}},
  };
  const std::map<std::string, std::string> metadata = {{"format", "pt"}, {quoted, quoted}};
  ASSERT_TRUE(WriteSafetensors(folder / "out.safetensors", tensors, metadata).ok());

  auto file = SafetensorsFile::Open(folder / "out.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->metadata(), metadata);
  ASSERT_EQ(file->tensors().size(), tensors.size());
  for (const SafetensorsTensor& tensor : tensors) {
    const SafetensorsEntry& entry = file->tensors().at(tensor.name);
    EXPECT_EQ(entry.dtype, tensor.dtype);
    EXPECT_EQ(entry.shape, tensor.shape);
    EXPECT_EQ(file->data(entry), tensor.data);
  }
  EXPECT_EQ(file->tensors().at("z").offset % 64, 0);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 1)
      << "a temporary file was left";
}

TEST(SafetensorsWriterTest, DataStartsAtAMultipleOf64WhateverTheHeader) {
  for (size_t length = 1; length < 70; ++length) {
    auto preamble = SafetensorsPreamble({{{std::string(length, 'n'), DType::kU8, {0}, {}}}});
    ASSERT_TRUE(preamble.ok());
    EXPECT_EQ(preamble->size() % 64, 0u);
    EXPECT_TRUE(Parse(*preamble).ok());
  }
}

TEST(SafetensorsWriterTest, RefusesWhatNoReaderWouldTake) {
  TempFolder folder;
  const std::string four = "1234";
  const std::vector<std::vector<SafetensorsTensor>> bad = {
      {{"a", DType::kU8, {4}, AsBytes(four)}, {"a", DType::kU8, {4}, AsBytes(four)}},
      {{"", DType::kU8, {4}, AsBytes(four)}},
      {{"__metadata__", DType::kU8, {4}, AsBytes(four)}},
      {{"bad\xFF", DType::kU8, {4}, AsBytes(four)}},
      {{"a", DType::kU8, {5}, AsBytes(four)}},
      {{"a", DType::kU8, {-4}, AsBytes(four)}},
      {{"a", DType::kF64, {1LL << 62}, {}}},
      {{"a", DType::kU8, std::vector<int64_t>(65, 1), {}}},
  };
  for (size_t i = 0; i < bad.size(); ++i) {
    absl::Status status = WriteSafetensors(folder / "bad", bad[i]);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << "case " << i;
  }
  EXPECT_EQ(WriteSafetensors(folder / "bad", {}, {{"k", "\xFF"}}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(WriteSafetensors(folder / "no/such/folder", {}).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(SafetensorsWriterTest, FailedReplacementLeavesTheOldFileAndNoOther) {
  TempFolder folder;
  // A folder in the target's place: every step but the last succeeds.
  fs::create_directories(folder / "out/inside");
  EXPECT_FALSE(WriteSafetensors(folder / "out", {}).ok());
  EXPECT_TRUE(fs::is_directory(folder / "out/inside"));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 1);
}

}  // namespace
}  // namespace dlo
