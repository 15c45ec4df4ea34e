#include "media/ffmpeg_util.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

namespace dlo {
namespace {

void LogFfmpeg(void* object, int level, const char* format, va_list args) {
  if (level > AV_LOG_ERROR) return;
  char line[512];
  int print_prefix = 1;
  av_log_format_line(object, level, format, args, line, sizeof(line), &print_prefix);
  spdlog::debug("ffmpeg: {}", std::string(absl::StripAsciiWhitespace(absl::string_view(line))));
}

int64_t CursorSize(const MemoryCursor& cursor) {
  return cursor.writable != nullptr ? cursor.writable->size() : cursor.readable.size();
}

int ReadCursor(void* opaque, uint8_t* buffer, int size) {
  auto& cursor = *static_cast<MemoryCursor*>(opaque);
  const int64_t n = std::min<int64_t>(size, CursorSize(cursor) - cursor.position);
  if (n <= 0) return AVERROR_EOF;
  const char* data = cursor.writable != nullptr ? cursor.writable->data() : cursor.readable.data();
  std::memcpy(buffer, data + cursor.position, n);
  cursor.position += n;
  return static_cast<int>(n);
}

int WriteCursor(void* opaque, uint8_t* buffer, int size) {
  auto& cursor = *static_cast<MemoryCursor*>(opaque);
  std::string& bytes = *cursor.writable;
  const size_t end = cursor.position + size;
  try {
    if (bytes.size() < end) bytes.resize(end);
  } catch (...) {
    return AVERROR(ENOMEM);
  }
  std::memcpy(bytes.data() + cursor.position, buffer, size);
  cursor.position = end;
  return size;
}

int64_t SeekCursor(void* opaque, int64_t offset, int whence) {
  auto& cursor = *static_cast<MemoryCursor*>(opaque);
  int64_t base = 0;
  switch (whence & ~AVSEEK_FORCE) {
    case AVSEEK_SIZE:
      return CursorSize(cursor);
    case SEEK_SET:
      break;
    case SEEK_CUR:
      base = cursor.position;
      break;
    case SEEK_END:
      base = CursorSize(cursor);
      break;
    default:
      return AVERROR(EINVAL);
  }
  if (offset < -base || offset > INT64_MAX - base) return AVERROR(EINVAL);
  return cursor.position = base + offset;
}

}  // namespace

void InitFfmpegLog() {
  static std::once_flag once;
  std::call_once(once, [] { av_log_set_callback(LogFfmpeg); });
}

std::string FfmpegError(int code) {
  char text[AV_ERROR_MAX_STRING_SIZE] = {};
  av_strerror(code, text, sizeof(text));
  return text;
}

absl::Status FfmpegStatus(int code, absl::string_view what) {
  if (code == AVERROR(ENOMEM))
    return absl::ResourceExhaustedError(absl::StrCat(what, ": out of memory"));
  return absl::InternalError(absl::StrCat(what, ": ", FfmpegError(code)));
}

IoPtr OpenMemoryIo(MemoryCursor* cursor) {
  constexpr int kBufferBytes = 64 << 10;
  auto* buffer = static_cast<uint8_t*>(av_malloc(kBufferBytes));
  if (buffer == nullptr) return nullptr;
  const bool write = cursor->writable != nullptr;
  AVIOContext* io = avio_alloc_context(buffer, kBufferBytes, write, cursor, ReadCursor,
                                       write ? WriteCursor : nullptr, SeekCursor);
  if (io == nullptr) av_free(buffer);
  return IoPtr(io);
}

absl::StatusOr<ScalerPtr> NewYuvScaler(const YuvConversion& c) {
  const AVPixelFormat from = c.to_yuv ? AV_PIX_FMT_RGB24 : c.yuv_format;
  const AVPixelFormat to = c.to_yuv ? c.yuv_format : AV_PIX_FMT_RGB24;
  // Full chroma filtering, and the same numbers on every processor.
  const int flags =
      SWS_BILINEAR | SWS_FULL_CHR_H_INP | SWS_FULL_CHR_H_INT | SWS_ACCURATE_RND | SWS_BITEXACT;
  ScalerPtr scaler(sws_getContext(c.width, c.height, from, c.width, c.height, to, flags, nullptr,
                                  nullptr, nullptr));
  if (scaler == nullptr) return absl::InternalError("libswscale cannot convert these frames");
  const int* matrix = sws_getCoefficients(c.matrix);
  const int yuv_range = c.yuv_full_range ? 1 : 0;
  constexpr int kUnchanged = 1 << 16;
  if (sws_setColorspaceDetails(scaler.get(), matrix, c.to_yuv ? 1 : yuv_range, matrix,
                               c.to_yuv ? yuv_range : 1, 0, kUnchanged, kUnchanged) < 0) {
    return absl::InternalError("libswscale cannot convert by this colour matrix");
  }
  return scaler;
}

}  // namespace dlo
