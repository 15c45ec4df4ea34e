// Owners for FFmpeg's objects, its errors as text, and files in memory. Internal to media/.
#pragma once

extern "C" {
#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <libswscale/swscale.h>
}

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dlo {

struct FreeCodecContext {
  void operator()(AVCodecContext* context) const { avcodec_free_context(&context); }
};
struct FreeFrame {
  void operator()(AVFrame* frame) const { av_frame_free(&frame); }
};
struct FreePacket {
  void operator()(AVPacket* packet) const { av_packet_free(&packet); }
};
struct FreeScaler {
  void operator()(SwsContext* context) const { sws_freeContext(context); }
};
struct FreeIo {
  void operator()(AVIOContext* io) const {
    av_free(io->buffer);  // which may have replaced the one given to it
    avio_context_free(&io);
  }
};
using CodecContextPtr = std::unique_ptr<AVCodecContext, FreeCodecContext>;
using FramePtr = std::unique_ptr<AVFrame, FreeFrame>;
using PacketPtr = std::unique_ptr<AVPacket, FreePacket>;
using ScalerPtr = std::unique_ptr<SwsContext, FreeScaler>;
using IoPtr = std::unique_ptr<AVIOContext, FreeIo>;

// Sends FFmpeg's own error messages to our debug log (what matters comes back as a Status) and
// drops the rest. May be called often.
void InitFfmpegLog();

// "No space left on device" and the like.
std::string FfmpegError(int code);

// `what` and the reason, as INTERNAL.
absl::Status FfmpegStatus(int code, absl::string_view what);

// One position in bytes that stand in for a file. `writable` null: read only.
struct MemoryCursor {
  absl::string_view readable;
  std::string* writable = nullptr;
  int64_t position = 0;
};

// Reads from, or writes to, *cursor, which must outlive the result. Null when out of memory.
IoPtr OpenMemoryIo(MemoryCursor* cursor);

// Between 8-bit RGB and yuv420p by the matrix of BT.709.
struct YuvConversion {
  int width = 0;
  int height = 0;
  AVPixelFormat yuv_format = AV_PIX_FMT_YUV420P;
  int matrix = SWS_CS_ITU709;
  bool yuv_full_range = false;
  bool to_yuv = true;  // else to RGB
};
absl::StatusOr<ScalerPtr> NewYuvScaler(const YuvConversion& conversion);

}  // namespace dlo
