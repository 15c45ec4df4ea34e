#include <cmath>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "media/ffmpeg_util.h"
#include "media/frame_encoder.h"

namespace dlo {
namespace {

AVRational FrameRate(double fps) {
  // 24000/1001 and the like are usually written with two or three decimals.
  const double ntsc = std::round(fps) * 1000 / 1001;
  if (std::abs(fps - ntsc) < 0.005) return {static_cast<int>(std::round(fps)) * 1000, 1001};
  return av_d2q(fps, 100000);
}

bool TakesYuv420p(const AVCodec& codec) {
  for (const AVPixelFormat* format = codec.pix_fmts;
       format != nullptr && *format != AV_PIX_FMT_NONE; ++format) {
    if (*format == AV_PIX_FMT_YUV420P) return true;
  }
  return false;
}

template <typename Visitor>
void ForEachVideoEncoder(Visitor visit) {
  void* cursor = nullptr;
  while (const AVCodec* codec = av_codec_iterate(&cursor)) {
    if (codec->type == AVMEDIA_TYPE_VIDEO && av_codec_is_encoder(codec)) visit(*codec);
  }
}

// libx264 first, then FFmpeg's own order.
std::vector<std::string> H264Encoders() {
  std::vector<std::string> names = {"libx264"};
  ForEachVideoEncoder([&](const AVCodec& codec) {
    if (codec.id == AV_CODEC_ID_H264 && TakesYuv420p(codec) && names[0] != codec.name) {
      names.push_back(codec.name);
    }
  });
  return names;
}

absl::StatusOr<CodecContextPtr> OpenEncoder(const std::string& name,
                                            const VideoWriterOptions& options) {
  const AVCodec* codec = avcodec_find_encoder_by_name(name.c_str());
  if (codec == nullptr || codec->id != AV_CODEC_ID_H264) {
    return absl::NotFoundError("not in this libavcodec");
  }
  CodecContextPtr context(avcodec_alloc_context3(codec));
  if (context == nullptr) return absl::ResourceExhaustedError("out of memory");
  const AVRational fps = FrameRate(options.fps);
  context->width = options.width;
  context->height = options.height;
  context->pix_fmt = AV_PIX_FMT_YUV420P;
  context->time_base = av_inv_q(fps);
  context->framerate = fps;
  context->color_range = AVCOL_RANGE_MPEG;
  context->colorspace = AVCOL_SPC_BT709;
  context->color_primaries = AVCOL_PRI_BT709;
  context->color_trc = AVCOL_TRC_BT709;
  context->chroma_sample_location = AVCHROMA_LOC_LEFT;
  // The bytes of x264 depend on the number of threads; one thread also leaves the cores to the
  // decoder of the VAE.
  context->thread_count = 1;
  context->flags |= AV_CODEC_FLAG_GLOBAL_HEADER | AV_CODEC_FLAG_BITEXACT;
  AVDictionary* settings = nullptr;
  absl::Cleanup free_settings = [&] { av_dict_free(&settings); };
  if (name == "libx264") {
    av_dict_set(&settings, "preset", "veryfast", 0);
    av_dict_set(&settings, "crf", "18", 0);
  } else {
    // Encoders without a constant-quality mode in common: half a bit a pixel is visually lossless
    // at these sizes.
    context->bit_rate = static_cast<int64_t>(0.5 * options.width * options.height * options.fps);
  }
  if (int rc = avcodec_open2(context.get(), codec, &settings); rc < 0) {
    return FfmpegStatus(rc, "cannot be opened");
  }
  return context;
}

absl::StatusOr<CodecContextPtr> OpenFirstEncoder(const std::vector<std::string>& encoders,
                                                 const VideoWriterOptions& options) {
  std::vector<std::string> reasons;
  for (const std::string& name : encoders) {
    absl::StatusOr<CodecContextPtr> context = OpenEncoder(name, options);
    if (context.ok()) return context;
    reasons.push_back(absl::StrCat(name, " (", context.status().message(), ")"));
  }
  std::vector<std::string> available;
  ForEachVideoEncoder([&](const AVCodec& codec) { available.push_back(codec.name); });
  return absl::FailedPreconditionError(absl::StrCat(
      "MP4 needs an H.264 encoder and none works here; tried: ", absl::StrJoin(reasons, ", "),
      ". Video encoders of this libavcodec: ", absl::StrJoin(available, ", "),
      ". Install a libavcodec with libx264 (Debian: libavcodec59 or libavcodec-extra59), or ask "
      "for a .png "
      "contact sheet or .safetensors instead"));
}

class Mp4Encoder : public FrameEncoder {
 public:
  explicit Mp4Encoder(CodecContextPtr codec) : codec_(std::move(codec)) {}
  ~Mp4Encoder() override { avformat_free_context(muxer_); }

  absl::Status Start() {
    const AVCodecContext& c = *codec_;
    ASSIGN_OR_RETURN(scaler_, NewYuvScaler({.width = c.width, .height = c.height}));
    frame_.reset(av_frame_alloc());
    packet_.reset(av_packet_alloc());
    file_.writable = &bytes_;
    io_ = OpenMemoryIo(&file_);
    if (frame_ == nullptr || packet_ == nullptr || io_ == nullptr) return OutOfMemory();
    frame_->format = c.pix_fmt;
    frame_->width = c.width;
    frame_->height = c.height;
    frame_->color_range = c.color_range;
    frame_->colorspace = c.colorspace;
    frame_->color_primaries = c.color_primaries;
    frame_->color_trc = c.color_trc;
    frame_->chroma_location = c.chroma_sample_location;
    RETURN_IF_ERROR(Check(av_frame_get_buffer(frame_.get(), 0), "cannot allocate a frame"));
    return StartMuxer();
  }

  FrameConversion conversion() const override { return FrameConversion::kTruncate; }

  absl::Status Add(absl::Span<const uint8_t> rgb) override {
    RETURN_IF_ERROR(Check(av_frame_make_writable(frame_.get()), "cannot allocate a frame"));
    const uint8_t* planes[4] = {rgb.data()};
    const int strides[4] = {3 * codec_->width};
    sws_scale(scaler_.get(), planes, strides, 0, codec_->height, frame_->data, frame_->linesize);
    frame_->pts = num_frames_++;
    return Send(frame_.get());
  }

  absl::StatusOr<std::string> Finish() override {
    RETURN_IF_ERROR(Send(nullptr));
    RETURN_IF_ERROR(Check(av_write_trailer(muxer_), "cannot finish the MP4"));
    avio_flush(io_.get());
    RETURN_IF_ERROR(Check(io_->error, "cannot finish the MP4"));
    return std::move(bytes_);
  }

 private:
  static absl::Status OutOfMemory() {
    return absl::ResourceExhaustedError("out of memory while opening the MP4 encoder");
  }

  absl::Status Check(int code, absl::string_view what) const {
    if (code >= 0) return absl::OkStatus();
    return FfmpegStatus(code, absl::StrCat(codec_->codec->name, ": ", what));
  }

  absl::Status StartMuxer() {
    RETURN_IF_ERROR(Check(avformat_alloc_output_context2(&muxer_, nullptr, "mp4", nullptr),
                          "cannot open the MP4 writer"));
    muxer_->pb = io_.get();
    muxer_->flags |= AVFMT_FLAG_CUSTOM_IO | AVFMT_FLAG_BITEXACT;
    // Moving the index to the front reads the file again through these two.
    muxer_->opaque = this;
    muxer_->io_open = ReopenForReading;
    muxer_->io_close2 = CloseReader;
    stream_ = avformat_new_stream(muxer_, nullptr);
    if (stream_ == nullptr) return OutOfMemory();
    stream_->time_base = codec_->time_base;
    stream_->avg_frame_rate = codec_->framerate;
    stream_->r_frame_rate = codec_->framerate;
    RETURN_IF_ERROR(Check(avcodec_parameters_from_context(stream_->codecpar, codec_.get()),
                          "cannot describe the stream"));
    AVDictionary* settings = nullptr;
    absl::Cleanup free_settings = [&] { av_dict_free(&settings); };
    av_dict_set(&settings, "movflags", "+faststart", 0);
    return Check(avformat_write_header(muxer_, &settings), "cannot write the header");
  }

  static int ReopenForReading(AVFormatContext* muxer, AVIOContext** io, const char*, int flags,
                              AVDictionary**) {
    if (flags & AVIO_FLAG_WRITE) return AVERROR(ENOSYS);
    auto* self = static_cast<Mp4Encoder*>(muxer->opaque);
    // Written once more while it is read: a reader of the string itself, not of a view that a
    // resize would leave dangling.
    self->reader_ = {.writable = &self->bytes_};
    IoPtr reader = OpenMemoryIo(&self->reader_);
    if (reader == nullptr) return AVERROR(ENOMEM);
    reader->write_flag = 0;
    *io = reader.release();
    return 0;
  }
  static int CloseReader(AVFormatContext*, AVIOContext* io) {
    FreeIo()(io);
    return 0;
  }

  absl::Status Send(const AVFrame* frame) {
    RETURN_IF_ERROR(Check(avcodec_send_frame(codec_.get(), frame), "cannot encode a frame"));
    for (;;) {
      const int rc = avcodec_receive_packet(codec_.get(), packet_.get());
      if (rc == AVERROR(EAGAIN) || rc == AVERROR_EOF) return absl::OkStatus();
      RETURN_IF_ERROR(Check(rc, "cannot encode a frame"));
      packet_->stream_index = stream_->index;
      packet_->duration = 1;
      av_packet_rescale_ts(packet_.get(), codec_->time_base, stream_->time_base);
      RETURN_IF_ERROR(
          Check(av_interleaved_write_frame(muxer_, packet_.get()), "cannot write a frame"));
    }
  }

  const CodecContextPtr codec_;
  ScalerPtr scaler_;
  FramePtr frame_;
  PacketPtr packet_;
  std::string bytes_;
  MemoryCursor file_;
  MemoryCursor reader_;
  IoPtr io_;
  AVFormatContext* muxer_ = nullptr;
  AVStream* stream_ = nullptr;  // the muxer's
  int64_t num_frames_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<FrameEncoder>> NewMp4Encoder(
    const VideoWriterOptions& options, const std::vector<std::string>& encoders) {
  InitFfmpegLog();
  ASSIGN_OR_RETURN(CodecContextPtr codec, OpenFirstEncoder(encoders, options));
  auto encoder = std::make_unique<Mp4Encoder>(std::move(codec));
  RETURN_IF_ERROR(encoder->Start());
  return encoder;
}

absl::StatusOr<std::unique_ptr<FrameEncoder>> NewMp4Encoder(const VideoWriterOptions& options) {
  return NewMp4Encoder(options, H264Encoders());
}

}  // namespace dlo
