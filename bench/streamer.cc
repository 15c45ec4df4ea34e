// What a visit costs the host thread that computes: everything that BlockStreamer does for it,
// without the moves themselves, which a device in virtual time makes free.
//
//   build/release/bench/bench_streamer
//
// Each iteration is one visit: an Acquire (which enqueues the moves of later visits) and the end of
// its lease, with the stamps for stalls. `traced` also logs the visit. The last two run on CPU
// streams with blocks of 256 bytes: there a thread per stream takes what is enqueued.
#include <benchmark/benchmark.h>

#include <memory>
#include <utility>
#include <vector>

#include "offload/block_streamer.h"
#include "runtime/cpu/cpu_device.h"
#include "runtime/sim/sim_device.h"

namespace dlo {
namespace {

constexpr int64_t kBlocks = 40;
constexpr int64_t kTensorsPerBlock = 24;

class Group : public Communicator {
 public:
  Group() : Communicator("simulated", 0, 4, absl::InfiniteDuration()) {}

 private:
  absl::Status Run(const CollectiveOp&) override { return absl::OkStatus(); }
  void Interrupt() override {}
  void Close() override {}
};

enum class Transfer { kDirect, kStaged, kGather };

void Visit(benchmark::State& state, Device& device, Transfer transfer, int slots, bool traced) {
  static const std::vector<std::byte> host(kTensorsPerBlock * 256);
  std::vector<TensorSpec> specs(kTensorsPerBlock,
                                {.name = "w", .shape = {256}, .dtype = DType::kU8});
  std::vector<std::vector<HostBlock>> rings(1);
  for (int64_t b = 0; b < kBlocks; ++b) {
    HostBlock block{.layout = BlockLayout::Of(specs)};
    if (transfer == Transfer::kStaged) {
      for (const auto& t : block.layout.tensors()) {
        block.pieces.push_back({host.data() + t.offset, t.offset, 256});
      }
    } else {
      block.bytes = host.data();
    }
    rings[0].push_back(std::move(block));
  }
  Group group;
  auto streamer = BlockStreamer::Create(device, std::move(rings), {.slots = slots},
                                        transfer == Transfer::kGather ? &group : nullptr);
  if (!streamer.ok()) return state.SkipWithError(streamer.status().ToString().c_str());
  VisitPlan plan({kBlocks});
  plan.Add(0, int64_t{1} << 40);
  VisitLog log(6000);
  if (!(*streamer)->Start(plan, traced ? &log : nullptr).ok()) {
    return state.SkipWithError("the plan does not start");
  }
  for (auto _ : state) {
    auto lease = (*streamer)->Acquire(0);
    if (!lease.ok()) return state.SkipWithError(lease.status().ToString().c_str());
    benchmark::DoNotOptimize(lease->data());
  }
}

void Simulated(benchmark::State& state, Transfer transfer, int slots, bool traced) {
  SimDevice device({});
  Visit(state, device, transfer, slots, traced);
}
BENCHMARK_CAPTURE(Simulated, direct, Transfer::kDirect, 2, false);
BENCHMARK_CAPTURE(Simulated, staged, Transfer::kStaged, 2, false);
BENCHMARK_CAPTURE(Simulated, gathered, Transfer::kGather, 2, false);
BENCHMARK_CAPTURE(Simulated, gathered_4_slots, Transfer::kGather, 4, false);
BENCHMARK_CAPTURE(Simulated, gathered_traced, Transfer::kGather, 2, true);

void CpuStreams(benchmark::State& state, Transfer transfer) {
  const std::unique_ptr<Device> device = MakeCpuDevice(0);
  Visit(state, *device, transfer, 2, false);
}
BENCHMARK_CAPTURE(CpuStreams, direct, Transfer::kDirect);
BENCHMARK_CAPTURE(CpuStreams, staged, Transfer::kStaged);

}  // namespace
}  // namespace dlo

BENCHMARK_MAIN();
