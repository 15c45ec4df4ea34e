#include "base/units.h"

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dlo {
namespace {

using ::testing::HasSubstr;

TEST(UnitsTest, ParsesSizes) {
  const std::vector<std::pair<const char*, int64_t>> cases = {
      {"0", 0},
      {"4096", 4096},
      {"7B", 7},
      {"1kB", 1000},
      {"1KiB", 1024},
      {"1.5GB", 1500000000},
      {"512MiB", 512ll << 20},
      {"20GiB", 20ll << 30},
      {" 2 TiB ", 2ll << 40},
      {"3TB", 3000000000000},
      {"0.5KiB", 512},
      {"0.3B", 0},
      {"9223372036854775807", std::numeric_limits<int64_t>::max()},
  };
  for (const auto& [text, bytes] : cases) {
    const absl::StatusOr<int64_t> parsed = ParseBytes(text);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, bytes) << text;
  }
}

TEST(UnitsTest, RefusesWhatIsNoSize) {
  for (const char* text : {"", "GiB", "-1GiB", "1gib", "1G", "1 2GiB", "1..5GB", ".", "1e3", "nan",
                           "inf", "0x10", "9223372036854775808", "8388608TiB", "1e400GB",
                           "5 potatoes", "99999999999999999999.5TiB", "1GiB\n\xff"}) {
    const absl::Status status = ParseBytes(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(status.message(), HasSubstr("20GiB"));
  }
  EXPECT_THAT(ParseBytes("1gib").status().message(), HasSubstr("\"1gib\""));
}

TEST(UnitsTest, FormatsSizesSoThatTheyParseAgain) {
  EXPECT_EQ(FormatBytes(20ll << 30), "20GiB");
  EXPECT_EQ(FormatBytes(1500000), "1500kB");
  EXPECT_EQ(FormatBytes(0), "0");
  EXPECT_EQ(FormatBytes(7), "7");
  for (int64_t bytes : {int64_t{1023}, int64_t{1024}, int64_t{1000}, int64_t{1025},
                        int64_t{123456789}, std::numeric_limits<int64_t>::max()}) {
    EXPECT_EQ(*ParseBytes(FormatBytes(bytes)), bytes);
  }
}

TEST(UnitsTest, ParsesDurations) {
  const std::vector<std::pair<const char*, absl::Duration>> cases = {
      {"500ms", absl::Milliseconds(500)}, {"2s", absl::Seconds(2)},
      {"5m", absl::Minutes(5)},           {"1h", absl::Hours(1)},
      {"1m30s", absl::Seconds(90)},       {"0", absl::ZeroDuration()},
      {"0s", absl::ZeroDuration()},       {"1.5s", absl::Milliseconds(1500)},
  };
  for (const auto& [text, duration] : cases) {
    const absl::StatusOr<absl::Duration> parsed = ParseDuration(text);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, duration) << text;
    EXPECT_EQ(*ParseDuration(absl::FormatDuration(*parsed)), duration);
  }
}

TEST(UnitsTest, RefusesWhatIsNoDuration) {
  for (const char* text :
       {"", "5", "-1s", "inf", "1d", "s", "nan", "1 s", "9999999999999999999h"}) {
    const absl::Status status = ParseDuration(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(status.message(), HasSubstr("500ms"));
  }
}

}  // namespace
}  // namespace dlo
