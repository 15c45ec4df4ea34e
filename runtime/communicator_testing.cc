#include "runtime/communicator_testing.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace dlo {
namespace {

// `bytes` of the memory under test.
class Bytes {
 public:
  Bytes(const TestMemory& memory, int64_t bytes)
      : data_(memory(std::max<int64_t>(bytes, 1))), bytes_(bytes) {
    std::memset(data_.get(), 0, std::max<int64_t>(bytes, 1));
  }
  std::byte* data() const { return data_.get(); }
  absl::Span<std::byte> span() const { return {data_.get(), static_cast<size_t>(bytes_)}; }

 private:
  std::shared_ptr<std::byte> data_;
  int64_t bytes_;
};

constexpr int64_t kSizes[] = {0, 1, 3, 255, 4096, 65537, (1 << 20) + 13};

// Byte i of what rank `from` has for rank `to`. Neighbouring ranks and positions differ.
std::byte Expected(int from, int to, int64_t i) {
  return static_cast<std::byte>(1 + from * 31 + to * 101 + i * 7 + (i >> 8) * 13);
}

void Fill(std::byte* data, int from, int to, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) data[i] = Expected(from, to, i);
}

absl::Status Compare(const std::byte* data, int from, int to, int64_t bytes,
                     absl::string_view what) {
  for (int64_t i = 0; i < bytes; ++i) {
    if (data[i] != Expected(from, to, i)) {
      return absl::DataLossError(absl::StrCat(what, " of ", bytes, " bytes: byte ", i,
                                              " of the part from rank ", from, " is wrong"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckGather(Communicator& group, const TestMemory& memory, int64_t bytes,
                         bool in_place) {
  Bytes recv(memory, bytes * group.size());
  Bytes own(memory, in_place ? 0 : bytes);
  std::byte* send = in_place ? recv.data() + group.rank() * bytes : own.data();
  Fill(send, group.rank(), 0, bytes);
  RETURN_IF_ERROR(group.AllGather(absl::MakeConstSpan(send, bytes), recv.span()));
  for (int rank = 0; rank < group.size(); ++rank) {
    RETURN_IF_ERROR(Compare(recv.data() + rank * bytes, rank, 0, bytes, "AllGather"));
  }
  return absl::OkStatus();
}

absl::Status CheckAllToAll(Communicator& group, const TestMemory& memory, int64_t bytes) {
  Bytes send(memory, bytes * group.size());
  Bytes recv(memory, bytes * group.size());
  for (int to = 0; to < group.size(); ++to) {
    Fill(send.data() + to * bytes, group.rank(), to, bytes);
  }
  RETURN_IF_ERROR(group.AllToAll(send.span(), recv.span()));
  for (int from = 0; from < group.size(); ++from) {
    RETURN_IF_ERROR(Compare(recv.data() + from * bytes, from, group.rank(), bytes, "AllToAll"));
  }
  return absl::OkStatus();
}

absl::Status CheckBroadcast(Communicator& group, const TestMemory& memory, int64_t bytes,
                            int root) {
  Bytes data(memory, bytes);
  if (group.rank() == root) Fill(data.data(), root, 5, bytes);
  RETURN_IF_ERROR(group.Broadcast(data.span(), root));
  return Compare(data.data(), root, 5, bytes, "Broadcast");
}

// Around the ring, `shift` ranks on.
absl::Status CheckSendRecv(Communicator& group, const TestMemory& memory, int64_t bytes,
                           int shift) {
  const int to = (group.rank() + shift) % group.size();
  const int from = (group.rank() + group.size() - shift % group.size()) % group.size();
  Bytes send(memory, bytes);
  Bytes recv(memory, bytes);
  Fill(send.data(), group.rank(), to, bytes);
  RETURN_IF_ERROR(group.SendRecv(send.span(), to, recv.span(), from));
  return Compare(recv.data(), from, group.rank(), bytes, "SendRecv");
}

// Only from the first to the last rank.
absl::Status CheckOneWay(Communicator& group, const TestMemory& memory, int64_t bytes) {
  const int last = group.size() - 1;
  if (last == 0) return absl::OkStatus();
  Bytes data(memory, bytes);
  if (group.rank() == 0) {
    Fill(data.data(), 0, last, bytes);
    return group.SendRecv(data.span(), last, {}, kNoPeer);
  }
  if (group.rank() != last) return group.SendRecv({}, kNoPeer, {}, kNoPeer);
  RETURN_IF_ERROR(group.SendRecv({}, kNoPeer, data.span(), 0));
  return Compare(data.data(), 0, last, bytes, "SendRecv one way");
}

float Addend(int rank, int64_t i) {
  return static_cast<float>((rank + 1) * (i % 17 + 1)) * (i % 2 == 0 ? 1.f : -1.f);
}

// Small whole numbers, which every order of adding sums exactly.
absl::Status CheckSum(Communicator& group, const TestMemory& memory, int64_t elements,
                      DType dtype) {
  const int64_t width = DTypeBytes(dtype);
  Bytes data(memory, elements * width);
  // The upper half of a float's bits are the bfloat16 of a number that needs no more.
  for (int64_t i = 0; i < elements; ++i) {
    const float value = Addend(group.rank(), i);
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint16_t half = static_cast<uint16_t>(bits >> 16);
    std::memcpy(data.data() + i * width,
                dtype == DType::kF32 ? static_cast<const void*>(&bits) : &half, width);
  }
  RETURN_IF_ERROR(group.AllReduceSum(data.span(), dtype));
  for (int64_t i = 0; i < elements; ++i) {
    float expected = 0;
    for (int rank = 0; rank < group.size(); ++rank) expected += Addend(rank, i);
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<std::byte*>(&bits) + (4 - width), data.data() + i * width, width);
    if (const float sum = std::bit_cast<float>(bits); sum != expected) {
      return absl::DataLossError(absl::StrCat("AllReduceSum of ", elements, " ", DTypeName(dtype),
                                              ": element ", i, " is ", sum, ", not ", expected));
    }
  }
  return absl::OkStatus();
}

absl::Status Check(Communicator& group, const TestMemory& memory) {
  RETURN_IF_ERROR(group.Barrier());
  for (int64_t bytes : kSizes) {
    RETURN_IF_ERROR(CheckGather(group, memory, bytes, /*in_place=*/false));
    RETURN_IF_ERROR(CheckGather(group, memory, bytes, /*in_place=*/true));
    RETURN_IF_ERROR(CheckAllToAll(group, memory, bytes));
    for (int root = 0; root < group.size(); ++root) {
      RETURN_IF_ERROR(CheckBroadcast(group, memory, bytes, root));
    }
    for (int shift = 0; shift < group.size(); ++shift) {
      RETURN_IF_ERROR(CheckSendRecv(group, memory, bytes, shift));
    }
    RETURN_IF_ERROR(CheckOneWay(group, memory, bytes));
    RETURN_IF_ERROR(CheckSum(group, memory, bytes, DType::kF32));
    RETURN_IF_ERROR(CheckSum(group, memory, bytes, DType::kBF16));
  }
  // A mistake of the caller is told and harms nothing.
  Bytes three(memory, 3);
  const absl::Status wrong[] = {group.AllGather(three.span(), three.span().subspan(1)),
                                group.AllReduceSum(three.span(), DType::kF32),
                                group.AllReduceSum(three.span(), DType::kI8),
                                group.Broadcast(three.span(), group.size()),
                                group.SendRecv(three.span(), -7, three.span(), 0),
                                group.SendRecv(three.span(), kNoPeer, {}, kNoPeer)};
  for (const absl::Status& status : wrong) {
    if (status.code() != absl::StatusCode::kInvalidArgument) {
      return absl::DataLossError(absl::StrCat("a wrong argument gave: ", status.ToString()));
    }
  }
  const absl::StatusOr<DeviceBuffer> buffer = group.AllocateBuffer(5000);
  RETURN_IF_ERROR(buffer.status());
  if (buffer->bytes() != 5000 || reinterpret_cast<uintptr_t>(buffer->data()) % 4096 != 0) {
    return absl::DataLossError("AllocateBuffer: not what was asked for");
  }
  const uint64_t before = group.sequence();
  RETURN_IF_ERROR(group.Barrier());
  if (group.sequence() != before + 1) return absl::DataLossError("a wrong argument was counted");
  return absl::OkStatus();
}

}  // namespace

std::string CheckCollectives(Communicator& communicator) {
  return CheckCollectives(communicator, [](int64_t bytes) {
    return std::shared_ptr<std::byte>(new std::byte[bytes], std::default_delete<std::byte[]>());
  });
}

std::string CheckCollectives(Communicator& communicator, const TestMemory& memory) {
  const absl::Status status = Check(communicator, memory);
  return status.ok() ? "" : status.ToString();
}

}  // namespace dlo
