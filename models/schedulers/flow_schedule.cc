#include "models/schedulers/flow_schedule.h"

#include <cmath>

namespace dlo {
namespace {

double Shift(double sigma, double shift) { return shift * sigma / (1 + (shift - 1) * sigma); }

// Point i of n points from `first` to `last`.
double Linspace(double first, double last, int n, int i) {
  return n == 1 ? first : first + (last - first) * i / (n - 1);
}

}  // namespace

FlowSchedule MakeFlowSchedule(SigmaGrid grid, double shift, int num_steps,
                              int num_train_timesteps) {
  const double train = num_train_timesteps;
  FlowSchedule schedule;
  for (int i = 0; i < num_steps; ++i) {
    double sigma = 0;
    switch (grid) {
      case SigmaGrid::kUniPC:
        sigma = Shift(Linspace(1, 1 / train, num_steps + 1, i), shift);
        // At exactly 1 the signal rate is 0 and its logarithm infinite.
        if (std::abs(sigma - 1) < 1e-6) sigma -= 1e-6;
        break;
      case SigmaGrid::kUniPCLegacy:
        sigma = Shift(Linspace(1 - 1 / train, 0, num_steps + 1, i), shift);
        break;
      case SigmaGrid::kEuler:
        // The training grid is shifted, its ends are interpolated, and the result is shifted again.
        sigma = Shift(Linspace(1, Shift(1 / train, shift), num_steps, i), shift);
        break;
      case SigmaGrid::kEulerNative:
        sigma = Shift(Linspace(1, 0, num_steps + 1, i), shift);
        break;
    }
    const bool integer = grid == SigmaGrid::kUniPC || grid == SigmaGrid::kUniPCLegacy;
    schedule.sigmas.push_back(static_cast<float>(sigma));
    schedule.timesteps.push_back(integer ? static_cast<float>(std::trunc(sigma * train))
                                         : schedule.sigmas.back() * static_cast<float>(train));
  }
  schedule.sigmas.push_back(0);
  return schedule;
}

}  // namespace dlo
