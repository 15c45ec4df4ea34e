#include "media/video_writer.h"

#include <png.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/sha256.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/safetensors.h"
#include "media/contact_sheet.h"
#include "media/frame_encoder.h"
#include "media/video_reader.h"

namespace dlo {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::chrono::seconds kDeadline(20);

// A smooth coloured background with a bright disc that moves to the right: [num_frames, height,
// width, 3].
std::vector<float> MovingDisc(int num_frames, int height, int width) {
  std::vector<float> rgb;
  rgb.reserve(size_t{3} * num_frames * height * width);
  for (int f = 0; f < num_frames; ++f) {
    const float cx = width * (0.2f + 0.6f * f / std::max(1, num_frames - 1));
    for (int y = 0; y < height; ++y) {
      for (int x = 0; x < width; ++x) {
        const float distance = std::hypot(x - cx, y - height / 2.0f);
        const float disc = std::clamp((height / 4.0f - distance) / 4.0f, 0.0f, 1.0f);
        rgb.push_back(0.1f + 0.8f * disc);
        rgb.push_back(0.2f + 0.3f * x / width);
        rgb.push_back(0.3f + 0.2f * y / height);
      }
    }
  }
  return rgb;
}

absl::StatusOr<EncodedVideo> EncodeInPieces(const VideoWriterOptions& options,
                                            const std::vector<float>& rgb, int frames_a_piece) {
  absl::StatusOr<std::unique_ptr<VideoWriter>> writer = VideoWriter::Create(options);
  if (!writer.ok()) return writer.status();
  const size_t piece = size_t{3} * options.width * options.height * frames_a_piece;
  for (size_t begin = 0; begin < rgb.size(); begin += piece) {
    absl::Status status = (*writer)->Append(absl::MakeConstSpan(rgb).subspan(begin, piece));
    if (!status.ok()) return status;
  }
  return (*writer)->Finish();
}

double Psnr(absl::Span<const float> a, absl::Span<const float> b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return -10 * std::log10(sum / a.size());
}

struct Image {
  int width = 0;
  int height = 0;
  std::vector<uint8_t> rgb;
  const uint8_t* at(int x, int y) const { return &rgb[3 * (size_t{1} * y * width + x)]; }
};

Image DecodePng(const std::string& bytes) {
  png_image png{};
  png.version = PNG_IMAGE_VERSION;
  EXPECT_TRUE(png_image_begin_read_from_memory(&png, bytes.data(), bytes.size())) << png.message;
  EXPECT_EQ(png.format, static_cast<png_uint_32>(PNG_FORMAT_RGB));
  Image image{static_cast<int>(png.width), static_cast<int>(png.height), {}};
  image.rgb.resize(PNG_IMAGE_SIZE(png));
  EXPECT_TRUE(png_image_finish_read(&png, nullptr, image.rgb.data(), 0, nullptr)) << png.message;
  return image;
}

TEST(Mp4WriterTest, WhatIsWrittenIsReadBack) {
  const VideoWriterOptions options{.width = 96, .height = 64, .num_frames = 9, .fps = 16};
  const std::vector<float> rgb = MovingDisc(9, 64, 96);
  absl::StatusOr<EncodedVideo> video = EncodeInPieces(options, rgb, 4);
  ASSERT_TRUE(video.ok()) << video.status();
  EXPECT_EQ(video->media_type, "video/mp4");
  absl::StatusOr<DecodedVideo> decoded = DecodeVideo(video->bytes);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->info.codec, "h264");
  EXPECT_EQ(decoded->info.pix_fmt, "yuv420p");
  EXPECT_EQ(decoded->info.color_space, "bt709");
  EXPECT_EQ(decoded->info.color_range, "tv");
  EXPECT_EQ(decoded->info.width, 96);
  EXPECT_EQ(decoded->info.height, 64);
  EXPECT_EQ(decoded->info.fps(), 16);
  EXPECT_EQ(decoded->info.num_frames, 9);
  EXPECT_TRUE(decoded->info.faststart);
  ASSERT_EQ(decoded->rgb.size(), rgb.size());
  // Frame by frame, so that an exchanged, lost or doubled frame is seen.
  const size_t frame = decoded->info.frame_values();
  for (int f = 0; f < 9; ++f) {
    EXPECT_GT(Psnr(absl::MakeConstSpan(decoded->rgb).subspan(f * frame, frame),
                   absl::MakeConstSpan(rgb).subspan(f * frame, frame)),
              35)
        << "frame " << f;
  }
}

// A conversion by another matrix or range than the file says shifts saturated colours by far more
// than the bound.
TEST(Mp4WriterTest, SaturatedColoursSurvive) {
  const float colours[][3] = {{1, 0, 0}, {0, 1, 0}, {0, 0, 1}, {1, 1, 1}, {0, 0, 0}, {1, 1, 0}};
  for (const auto& colour : colours) {
    std::vector<float> rgb;
    for (int i = 0; i < 32 * 32; ++i) rgb.insert(rgb.end(), colour, colour + 3);
    absl::StatusOr<EncodedVideo> video =
        EncodeInPieces({.width = 32, .height = 32, .num_frames = 1, .fps = 8}, rgb, 1);
    ASSERT_TRUE(video.ok()) << video.status();
    absl::StatusOr<DecodedVideo> decoded = DecodeVideo(video->bytes);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    ASSERT_EQ(decoded->info.num_frames, 1);
    for (size_t i = 0; i < rgb.size(); ++i) ASSERT_NEAR(decoded->rgb[i], rgb[i], 0.02) << i;
  }
}

TEST(Mp4WriterTest, SameInputGivesSameBytes) {
  const VideoWriterOptions options{.width = 64, .height = 64, .num_frames = 17, .fps = 24};
  const std::vector<float> rgb = MovingDisc(17, 64, 64);
  absl::StatusOr<EncodedVideo> a = EncodeInPieces(options, rgb, 17);
  absl::StatusOr<EncodedVideo> b = EncodeInPieces(options, rgb, 1);
  ASSERT_TRUE(a.ok() && b.ok()) << a.status() << b.status();
  EXPECT_EQ(a->bytes, b->bytes);
  EXPECT_EQ(a->sha256, b->sha256);
  Sha256 hash;
  hash.Update(a->bytes);
  EXPECT_EQ(a->sha256, hash.Finish());
}

TEST(Mp4WriterTest, RatesAreExactFractions) {
  struct Case {
    double fps;
    int num, den;
  };
  for (const Case& c : {Case{16, 16, 1}, Case{23.976, 24000, 1001}, Case{29.97, 30000, 1001},
                        Case{12.5, 25, 2}, Case{0.5, 1, 2}}) {
    const std::vector<float> rgb = MovingDisc(3, 16, 16);
    absl::StatusOr<EncodedVideo> video =
        EncodeInPieces({.width = 16, .height = 16, .num_frames = 3, .fps = c.fps}, rgb, 3);
    ASSERT_TRUE(video.ok()) << video.status();
    absl::StatusOr<DecodedVideo> decoded = DecodeVideo(video->bytes);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(decoded->info.fps_num, c.num) << c.fps;
    EXPECT_EQ(decoded->info.fps_den, c.den) << c.fps;
    EXPECT_EQ(decoded->info.num_frames, 3) << c.fps;
  }
}

TEST(Mp4WriterTest, WithoutAnH264EncoderTheErrorNamesThoseThatExist) {
  absl::Status status =
      NewMp4Encoder({.width = 16, .height = 16, .num_frames = 1}, {"libnothing"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("libnothing"), HasSubstr("mpeg4"), HasSubstr("Install")));
}

TEST(Mp4WriterTest, FallsBackToTheNextEncoderThatOpens) {
  EXPECT_TRUE(
      NewMp4Encoder({.width = 16, .height = 16, .num_frames = 1}, {"libnothing", "libx264"}).ok());
}

TEST(ContactSheetTest, Layout) {
  struct Case {
    int num_frames, columns, rows, width, height;
  };
  for (const Case& c : {Case{1, 1, 1, 10, 6}, Case{2, 2, 1, 22, 6}, Case{5, 3, 2, 34, 14},
                        Case{16, 4, 4, 46, 30}, Case{81, 4, 4, 46, 30}}) {
    const ContactSheetLayout sheet = LayOutContactSheet(c.num_frames, 10, 6);
    EXPECT_EQ(sheet.columns, c.columns) << c.num_frames;
    EXPECT_EQ(sheet.rows, c.rows) << c.num_frames;
    EXPECT_EQ(sheet.width(), c.width) << c.num_frames;
    EXPECT_EQ(sheet.height(), c.height) << c.num_frames;
    EXPECT_EQ(sheet.frames.front(), 0);
    EXPECT_EQ(sheet.frames.back(), c.num_frames - 1);
  }
  EXPECT_THAT(LayOutContactSheet(81, 10, 6).frames,
              ElementsAre(0, 5, 11, 16, 21, 27, 32, 37, 43, 48, 53, 59, 64, 69, 75, 80));
}

TEST(PngSheetWriterTest, CellsAreTheRoundedFrames) {
  constexpr int kFrames = 21, kHeight = 12, kWidth = 20;
  const std::vector<float> rgb = MovingDisc(kFrames, kHeight, kWidth);
  absl::StatusOr<EncodedVideo> video = EncodeInPieces(
      {.format = VideoFormat::kPngSheet, .width = kWidth, .height = kHeight, .num_frames = kFrames},
      rgb, 4);
  ASSERT_TRUE(video.ok()) << video.status();
  EXPECT_EQ(video->media_type, "image/png");
  const Image image = DecodePng(video->bytes);
  const ContactSheetLayout sheet = LayOutContactSheet(kFrames, kWidth, kHeight);
  ASSERT_EQ(image.width, sheet.width());
  ASSERT_EQ(image.height, sheet.height());
  for (size_t cell = 0; cell < sheet.frames.size(); ++cell) {
    const float* frame = &rgb[size_t{3} * kHeight * kWidth * sheet.frames[cell]];
    for (int y = 0; y < kHeight; ++y) {
      for (int i = 0; i < 3 * kWidth; ++i) {
        ASSERT_EQ(image.at(sheet.left(cell), sheet.top(cell) + y)[i],
                  std::lrint(frame[3 * kWidth * y + i] * 255))
            << "cell " << cell << " row " << y << " value " << i;
      }
    }
  }
}

TEST(PngSheetWriterTest, GapsAndCellsLeftOverAreGrey) {
  const std::vector<float> rgb(size_t{3} * 3 * 4 * 4, 0.0f);
  absl::StatusOr<EncodedVideo> video = EncodeInPieces(
      {.format = VideoFormat::kPngSheet, .width = 4, .height = 4, .num_frames = 3}, rgb, 3);
  ASSERT_TRUE(video.ok()) << video.status();
  const Image image = DecodePng(video->bytes);
  ASSERT_EQ(image.width, 10);
  ASSERT_EQ(image.height, 10);
  EXPECT_EQ(*image.at(3, 3), 0);
  EXPECT_EQ(*image.at(4, 0), ContactSheetLayout::kGrey);
  EXPECT_EQ(*image.at(0, 5), ContactSheetLayout::kGrey);
  EXPECT_EQ(*image.at(6, 6), ContactSheetLayout::kGrey);
  EXPECT_EQ(*image.at(6, 0), 0);
}

TEST(SafetensorsWriterTest, HoldsTheValuesBitForBit) {
  std::vector<float> rgb = MovingDisc(5, 6, 10);
  rgb[0] = -0.0f;
  rgb[1] = std::numeric_limits<float>::denorm_min();
  rgb[2] = 1.5f;
  absl::StatusOr<EncodedVideo> video = EncodeInPieces(
      {.format = VideoFormat::kSafetensors, .width = 10, .height = 6, .num_frames = 5}, rgb, 2);
  ASSERT_TRUE(video.ok()) << video.status();
  const std::filesystem::path path =
      std::filesystem::path(::testing::TempDir()) / "dlo_video_writer_test.safetensors";
  std::ofstream(path, std::ios::binary) << video->bytes;
  absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path);
  std::filesystem::remove(path);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(file->tensors().size(), 1);
  const SafetensorsEntry& entry = file->tensors().at("video");
  EXPECT_EQ(entry.dtype, DType::kF32);
  EXPECT_THAT(entry.shape, ElementsAre(5, 6, 10, 3));
  const absl::Span<const std::byte> data = file->data(entry);
  ASSERT_EQ(data.size(), rgb.size() * sizeof(float));
  EXPECT_EQ(std::memcmp(data.data(), rgb.data(), data.size()), 0);
}

TEST(ConvertFrameTest, TruncatesOrRoundsAndClamps) {
  const std::vector<float> rgb = {-1.0f,      0.0f,    0.999f / 255, 1.6f / 255,
                                  2.5f / 255, 0.9999f, 1.0f,         7.0f};
  std::vector<uint8_t> out(rgb.size());
  ASSERT_TRUE(ConvertFrame(FrameConversion::kTruncate, rgb, out.data()));
  EXPECT_THAT(out, ElementsAre(0, 0, 0, 1, 2, 254, 255, 255));
  ASSERT_TRUE(ConvertFrame(FrameConversion::kRound, rgb, out.data()));
  EXPECT_THAT(out, ElementsAre(0, 0, 1, 2, 2, 255, 255, 255));
}

class AnyFormatTest : public ::testing::TestWithParam<VideoFormat> {
 protected:
  VideoWriterOptions options_{.format = GetParam(), .width = 16, .height = 16, .num_frames = 4};
  const size_t frame_values_ = size_t{3} * 16 * 16;
};

TEST_P(AnyFormatTest, ValuesThatAreNotFiniteNameTheFrame) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    auto writer = VideoWriter::Create(options_);
    ASSERT_TRUE(writer.ok()) << writer.status();
    std::vector<float> rgb(3 * frame_values_, 0.5f);
    rgb[2 * frame_values_ + 7] = bad;
    const absl::Status status = (*writer)->Append(rgb);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("frame 2"));
    EXPECT_EQ((*writer)->Append({}), status);
    EXPECT_EQ((*writer)->Finish().status(), status);
  }
}

TEST_P(AnyFormatTest, FramesMustBeWholeAndAsManyAsAnnounced) {
  std::vector<float> rgb(5 * frame_values_, 0.5f);
  auto part = VideoWriter::Create(options_);
  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_EQ((*part)->Append(absl::MakeConstSpan(rgb).first(frame_values_ + 3)).code(),
            absl::StatusCode::kInvalidArgument);

  auto more = VideoWriter::Create(options_);
  ASSERT_TRUE(more.ok()) << more.status();
  EXPECT_EQ((*more)->Append(rgb).code(), absl::StatusCode::kInvalidArgument);

  auto fewer = VideoWriter::Create(options_);
  ASSERT_TRUE(fewer.ok()) << fewer.status();
  EXPECT_TRUE((*fewer)->Append(absl::MakeConstSpan(rgb).first(3 * frame_values_)).ok());
  const absl::Status status = (*fewer)->Finish().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("3 of its 4 frames"));
}

TEST_P(AnyFormatTest, IsHandedOverOnce) {
  auto writer = VideoWriter::Create(options_);
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE((*writer)->Append(std::vector<float>(4 * frame_values_, 0.5f)).ok());
  ASSERT_TRUE((*writer)->Finish().ok());
  EXPECT_EQ((*writer)->Finish().status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_P(AnyFormatTest, AbandonedAtAnyPoint) {
  for (int frames = 0; frames <= 4; ++frames) {
    auto writer = VideoWriter::Create(options_);
    ASSERT_TRUE(writer.ok()) << writer.status();
    EXPECT_TRUE((*writer)->Append(std::vector<float>(frames * frame_values_, 0.5f)).ok());
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, AnyFormatTest,
                         ::testing::Values(VideoFormat::kMp4, VideoFormat::kPngSheet,
                                           VideoFormat::kSafetensors));

TEST(VideoWriterTest, BadOptionsNameTheField) {
  struct Case {
    VideoWriterOptions options;
    const char* field;
  };
  for (const Case& c : {Case{{.width = 0, .height = 16, .num_frames = 1}, "width"},
                        Case{{.width = 16, .height = 1 << 20, .num_frames = 1}, "height"},
                        Case{{.width = 16, .height = 16, .num_frames = 0}, "num_frames"},
                        Case{{.width = 15, .height = 16, .num_frames = 1}, "width"},
                        Case{{.width = 16, .height = 16, .num_frames = 1, .fps = 0}, "fps"},
                        Case{{.width = 16, .height = 16, .num_frames = 1, .fps = NAN}, "fps"}}) {
    const absl::Status status = VideoWriter::Create(c.options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.field;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.field));
  }
}

// Holds every frame until told to go on.
class GatedEncoder : public FrameEncoder {
 public:
  class Control {
   public:
    // Lets this many frames pass in all.
    void Allow(int num_frames) {
      std::lock_guard lock(mu_);
      num_allowed_ = num_frames;
      changed_.notify_all();
    }
    // Waits until this many frames have reached the encoder.
    bool WaitForEntered(int num_frames) {
      std::unique_lock lock(mu_);
      return changed_.wait_for(lock, kDeadline, [&] { return num_entered_ >= num_frames; });
    }
    void Enter() {
      std::unique_lock lock(mu_);
      ++num_entered_;
      changed_.notify_all();
      changed_.wait_for(lock, kDeadline, [this] { return num_entered_ <= num_allowed_; });
    }

    absl::Status result;     // of Add
    bool destroyed = false;  // the encoder

   private:
    std::mutex mu_;
    std::condition_variable changed_;
    int num_allowed_ = 0;
    int num_entered_ = 0;
  };
  explicit GatedEncoder(Control* control) : control_(control) {}
  ~GatedEncoder() override { control_->destroyed = true; }
  FrameConversion conversion() const override { return FrameConversion::kTruncate; }
  absl::Status Add(absl::Span<const uint8_t> frame) override {
    control_->Enter();
    return control_->result;
  }
  absl::StatusOr<std::string> Finish() override { return "all"; }

 private:
  Control* const control_;
};

// With a queue of two frames and one in the encoder, the fourth has to wait.
TEST(VideoWriterTest, AppendBlocksWhileTheQueueIsFull) {
  const VideoWriterOptions options{.width = 2, .height = 2, .num_frames = 4, .queue_frames = 2};
  GatedEncoder::Control control;
  auto writer = NewVideoWriter(options, std::make_unique<GatedEncoder>(&control));
  const std::vector<float> frame(12, 0.5f);
  ASSERT_TRUE(writer->Append(frame).ok());
  ASSERT_TRUE(control.WaitForEntered(1));
  ASSERT_TRUE(writer->Append(frame).ok());
  ASSERT_TRUE(writer->Append(frame).ok());

  std::future<absl::Status> fourth =
      std::async(std::launch::async, [&] { return writer->Append(frame); });
  EXPECT_EQ(fourth.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  control.Allow(1);
  ASSERT_EQ(fourth.wait_for(kDeadline), std::future_status::ready);
  EXPECT_TRUE(fourth.get().ok());
  control.Allow(4);
  absl::StatusOr<EncodedVideo> video = writer->Finish();
  ASSERT_TRUE(video.ok()) << video.status();
  EXPECT_EQ(video->bytes, "all");
}

TEST(VideoWriterTest, AnEncoderErrorWakesABlockedAppendAndStays) {
  const VideoWriterOptions options{.width = 2, .height = 2, .num_frames = 9, .queue_frames = 1};
  GatedEncoder::Control control;
  control.result = absl::InternalError("disc on fire");
  auto writer = NewVideoWriter(options, std::make_unique<GatedEncoder>(&control));
  std::future<absl::Status> appended = std::async(
      std::launch::async, [&] { return writer->Append(std::vector<float>(size_t{9} * 12, 0.5f)); });
  control.Allow(1);
  ASSERT_EQ(appended.wait_for(kDeadline), std::future_status::ready);
  EXPECT_EQ(appended.get(), control.result);
  EXPECT_EQ(writer->Finish().status(), control.result);
}

TEST(VideoWriterTest, DestructionJoinsTheThreadAndFreesTheEncoder) {
  GatedEncoder::Control control;
  control.Allow(100);
  {
    auto writer = NewVideoWriter({.width = 2, .height = 2, .num_frames = 3},
                                 std::make_unique<GatedEncoder>(&control));
    ASSERT_TRUE(writer->Append(std::vector<float>(12, 0.5f)).ok());
  }
  EXPECT_TRUE(control.destroyed);
}

TEST(VideoReaderTest, WhatIsNoVideoIsAnError) {
  EXPECT_EQ(DecodeVideo("").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DecodeVideo("not a video at all").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadVideo("/nonexistent/x.mp4").status().code(), absl::StatusCode::kNotFound);
}

TEST(VideoReaderTest, DamagedFilesNeverCrash) {
  const std::vector<float> rgb = MovingDisc(5, 32, 32);
  absl::StatusOr<EncodedVideo> video =
      EncodeInPieces({.width = 32, .height = 32, .num_frames = 5}, rgb, 5);
  ASSERT_TRUE(video.ok()) << video.status();
  // Cut inside the index: nothing to decode.
  EXPECT_EQ(DecodeVideo(absl::string_view(video->bytes).substr(0, 100)).status().code(),
            absl::StatusCode::kInvalidArgument);
  for (size_t i = 0; i < video->bytes.size(); i += 13) {
    std::string damaged = video->bytes;
    damaged[i] = static_cast<char>(~damaged[i]);
    (void)DecodeVideo(damaged).status();
  }
}

}  // namespace
}  // namespace dlo
