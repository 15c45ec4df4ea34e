#include "media/video_reader.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "media/ffmpeg_util.h"

extern "C" {
#include <libavutil/pixdesc.h>
}

namespace dlo {
namespace {

constexpr int kSideMax = 16384;

absl::Status Undecodable(absl::string_view what, absl::string_view reason) {
  return absl::InvalidArgumentError(absl::StrCat("video: ", what, ": ", reason));
}

absl::Status Check(int code, absl::string_view what) {
  if (code >= 0) return absl::OkStatus();
  if (code == AVERROR(ENOMEM)) return FfmpegStatus(code, absl::StrCat("video: ", what));
  return Undecodable(what, FfmpegError(code));
}

uint64_t BigEndian(absl::string_view bytes) {
  uint64_t value = 0;
  for (const char byte : bytes) value = value << 8 | static_cast<unsigned char>(byte);
  return value;
}

// Walks the top-level boxes of ISO/IEC 14496-12: 4 bytes size, 4 bytes type; size 1: 8 more bytes
// of size; 0: to the end.
bool IndexBeforeData(absl::string_view bytes) {
  constexpr size_t kHeaderBytes = 8;
  while (bytes.size() >= kHeaderBytes) {
    const absl::string_view type = bytes.substr(4, 4);
    if (type == "moov") return true;
    if (type == "mdat") return false;
    uint64_t size = BigEndian(bytes.substr(0, 4));
    if (size == 1 && bytes.size() >= 2 * kHeaderBytes) size = BigEndian(bytes.substr(8, 8));
    if (size < kHeaderBytes || size > bytes.size()) return false;
    bytes.remove_prefix(size);
  }
  return false;
}

std::string Text(const char* name) { return name == nullptr ? "unknown" : name; }

int Matrix(AVColorSpace space) {
  switch (space) {
    case AVCOL_SPC_BT470BG:
    case AVCOL_SPC_SMPTE170M:
      return SWS_CS_ITU601;
    case AVCOL_SPC_BT2020_NCL:
    case AVCOL_SPC_BT2020_CL:
      return SWS_CS_BT2020;
    default:
      return SWS_CS_ITU709;
  }
}

class FfmpegReader : public VideoReader {
 public:
  explicit FfmpegReader(absl::string_view bytes) : file_{.readable = bytes} {}
  ~FfmpegReader() override { avformat_close_input(&demuxer_); }

  absl::Status Start() {
    io_ = OpenMemoryIo(&file_);
    frame_.reset(av_frame_alloc());
    packet_.reset(av_packet_alloc());
    demuxer_ = avformat_alloc_context();
    if (!io_ || !frame_ || !packet_ || demuxer_ == nullptr) {
      return absl::ResourceExhaustedError("video: out of memory");
    }
    demuxer_->pb = io_.get();
    demuxer_->flags |= AVFMT_FLAG_CUSTOM_IO;
    RETURN_IF_ERROR(Check(avformat_open_input(&demuxer_, nullptr, nullptr, nullptr),
                          "not a video file that FFmpeg knows"));
    RETURN_IF_ERROR(Check(avformat_find_stream_info(demuxer_, nullptr), "no stream to be found"));
    const AVCodec* codec = nullptr;
    stream_ = av_find_best_stream(demuxer_, AVMEDIA_TYPE_VIDEO, -1, -1, &codec, 0);
    RETURN_IF_ERROR(Check(stream_, "no video stream that can be decoded"));
    const AVStream& stream = *demuxer_->streams[stream_];
    codec_.reset(avcodec_alloc_context3(codec));
    if (codec_ == nullptr) return absl::ResourceExhaustedError("video: out of memory");
    RETURN_IF_ERROR(Check(avcodec_parameters_to_context(codec_.get(), stream.codecpar),
                          "bad stream parameters"));
    codec_->thread_count = 1;
    RETURN_IF_ERROR(Check(avcodec_open2(codec_.get(), codec, nullptr), "cannot open the decoder"));
    return Describe(stream);
  }

  const VideoInfo& info() const override { return info_; }

  absl::StatusOr<bool> Next(absl::Span<float> rgb) override {
    if (rgb.size() != info_.frame_values()) {
      return absl::InvalidArgumentError(
          absl::StrCat("rgb: ", rgb.size(), " values, a frame has ", info_.frame_values()));
    }
    ASSIGN_OR_RETURN(const bool more, Decode());
    if (!more) return false;
    if (frame_->width != info_.width || frame_->height != info_.height) {
      return Undecodable("the size changes within the video",
                         absl::StrCat(frame_->width, " x ", frame_->height));
    }
    if (scaler_ == nullptr) {
      ASSIGN_OR_RETURN(scaler_,
                       NewYuvScaler({.width = info_.width,
                                     .height = info_.height,
                                     .yuv_format = static_cast<AVPixelFormat>(frame_->format),
                                     .matrix = Matrix(frame_->colorspace),
                                     .yuv_full_range = frame_->color_range == AVCOL_RANGE_JPEG,
                                     .to_yuv = false}));
      format_ = frame_->format;
    }
    if (frame_->format != format_) {
      return Undecodable("the pixel format changes within the video", info_.pix_fmt);
    }
    // libswscale may write a little past the last pixel of a row.
    constexpr int kSpareBytes = 64;
    rgb8_.resize(rgb.size() + kSpareBytes);
    uint8_t* planes[4] = {rgb8_.data()};
    const int strides[4] = {3 * info_.width};
    sws_scale(scaler_.get(), frame_->data, frame_->linesize, 0, info_.height, planes, strides);
    std::transform(rgb8_.begin(), rgb8_.begin() + rgb.size(), rgb.begin(),
                   [](uint8_t value) { return static_cast<float>(value) / 255.0f; });
    return true;
  }

 private:
  absl::Status Describe(const AVStream& stream) {
    info_.codec = avcodec_get_name(codec_->codec_id);
    info_.pix_fmt = Text(av_get_pix_fmt_name(codec_->pix_fmt));
    info_.color_space = Text(av_color_space_name(codec_->colorspace));
    info_.color_range = Text(av_color_range_name(codec_->color_range));
    info_.width = codec_->width;
    info_.height = codec_->height;
    info_.fps_num = stream.avg_frame_rate.num;
    info_.fps_den = std::max(1, stream.avg_frame_rate.den);
    info_.num_frames = static_cast<int>(std::clamp<int64_t>(stream.nb_frames, 0, INT32_MAX));
    info_.faststart = IndexBeforeData(file_.readable);
    if (info_.width < 1 || info_.height < 1 || info_.width > kSideMax || info_.height > kSideMax) {
      return Undecodable("size", absl::StrCat(info_.width, " x ", info_.height));
    }
    return absl::OkStatus();
  }

  // The next frame in frame_, or false at the end.
  absl::StatusOr<bool> Decode() {
    for (;;) {
      const int rc = avcodec_receive_frame(codec_.get(), frame_.get());
      if (rc == AVERROR_EOF) return false;
      if (rc != AVERROR(EAGAIN)) {
        RETURN_IF_ERROR(Check(rc, "cannot decode a frame"));
        return true;
      }
      RETURN_IF_ERROR(Feed());
    }
  }

  absl::Status Feed() {
    for (;;) {
      av_packet_unref(packet_.get());
      const int rc = av_read_frame(demuxer_, packet_.get());
      if (rc == AVERROR_EOF) {
        return Check(avcodec_send_packet(codec_.get(), nullptr), "cannot end the stream");
      }
      RETURN_IF_ERROR(Check(rc, "cannot read a packet"));
      if (packet_->stream_index != stream_) continue;
      return Check(avcodec_send_packet(codec_.get(), packet_.get()), "cannot decode a packet");
    }
  }

  MemoryCursor file_;
  IoPtr io_;
  AVFormatContext* demuxer_ = nullptr;
  int stream_ = -1;
  CodecContextPtr codec_;
  FramePtr frame_;
  PacketPtr packet_;
  ScalerPtr scaler_;
  int format_ = AV_PIX_FMT_NONE;
  std::vector<uint8_t> rgb8_;
  VideoInfo info_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<VideoReader>> VideoReader::Open(absl::string_view bytes) {
  InitFfmpegLog();
  auto reader = std::make_unique<FfmpegReader>(bytes);
  RETURN_IF_ERROR(reader->Start());
  return reader;
}

absl::StatusOr<DecodedVideo> DecodeVideo(absl::string_view bytes) {
  ASSIGN_OR_RETURN(std::unique_ptr<VideoReader> reader, VideoReader::Open(bytes));
  DecodedVideo video;
  video.info = reader->info();
  video.info.num_frames = 0;
  const size_t frame_values = video.info.frame_values();
  for (;;) {
    const size_t begin = video.rgb.size();
    video.rgb.resize(begin + frame_values);
    ASSIGN_OR_RETURN(const bool more,
                     reader->Next(absl::MakeSpan(video.rgb).subspan(begin, frame_values)));
    if (!more) {
      video.rgb.resize(begin);
      return video;
    }
    ++video.info.num_frames;
  }
}

absl::StatusOr<DecodedVideo> ReadVideo(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path.string(), ": cannot be opened"));
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return DecodeVideo(bytes);
}

}  // namespace dlo
