#include "models/schedulers/flow_solver.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace dlo {
namespace {

// sigma as a tensor without dimensions: its product with a bfloat16 tensor is bfloat16, as in
// diffusers.
at::Tensor Scalar(float value, const at::Tensor& like) {
  return at::scalar_tensor(value, at::TensorOptions().dtype(at::kFloat).device(like.device()));
}

class EulerSolver : public FlowSolver {
 public:
  explicit EulerSolver(FlowSchedule schedule) : FlowSolver(std::move(schedule)) {}

  at::Tensor Step(const at::Tensor& velocity, const at::Tensor& latents) override {
    const float step = schedule_.sigmas.at(step_ + 1) - schedule_.sigmas.at(step_);
    ++step_;
    return (latents.to(at::kFloat) + velocity * Scalar(step, velocity)).to(velocity.scalar_type());
  }

 private:
  size_t step_ = 0;
};

// UniPC of order one or two with the B2(h) = expm1(-h) solver, on predictions of the clean sample
// x0. Source: Zhao et al. 2023, "UniPC", as in diffusers 0.42 UniPCMultistepScheduler (flow
// prediction, predict_x0, bh2).
class UniPcSolver : public FlowSolver {
 public:
  UniPcSolver(const FlowSchedulerConfig& config, FlowSchedule schedule)
      : FlowSolver(std::move(schedule)),
        max_order_(config.solver_order),
        disable_corrector_(config.disable_corrector) {}

  at::Tensor Step(const at::Tensor& velocity, const at::Tensor& latents) override {
    const at::Tensor given = latents.to(at::kFloat);
    const at::Tensor x0 = given - velocity * Scalar(schedule_.sigmas.at(step_), velocity);

    const bool correct =
        step_ > 0 && std::find(disable_corrector_.begin(), disable_corrector_.end(), step_ - 1) ==
                         disable_corrector_.end();
    const at::Tensor x = correct ? Correct(x0) : given;

    previous_x0_ = std::move(last_x0_);
    last_x0_ = x0;
    const int num_steps = static_cast<int>(schedule_.timesteps.size());
    order_ = std::min({max_order_, num_steps - step_, step_ + 1});
    last_sample_ = x;
    at::Tensor next = Predict(x);
    ++step_;
    return next;
  }

 private:
  float Alpha(int i) const { return 1 - schedule_.sigmas[i]; }
  // Half the logarithm of the signal-to-noise ratio; infinite at the last level.
  float Lambda(int i) const { return std::log(Alpha(i)) - std::log(schedule_.sigmas[i]); }

  // UniC: takes the previous step again, now knowing x0 at its end.
  at::Tensor Correct(const at::Tensor& x0) const {
    const int i = step_;
    const float h = Lambda(i) - Lambda(i - 1), q = std::expm1(-h);
    const at::Tensor base =
        last_sample_ * (schedule_.sigmas[i] / schedule_.sigmas[i - 1]) - last_x0_ * (Alpha(i) * q);
    if (order_ == 1) return base - (x0 - last_x0_) * (Alpha(i) * q * 0.5f);

    const float r = (Lambda(i - 2) - Lambda(i - 1)) / h, z = -h;
    const float g1 = q / z - 1, b1 = g1 / q, g2 = g1 / z - 0.5f, b2 = 2 * g2 / q;
    const float rho0 = (b1 - b2) / (1 - r), rho1 = b1 - rho0;
    return base -
           ((previous_x0_ - last_x0_) * (rho0 / r) + (x0 - last_x0_) * rho1) * (Alpha(i) * q);
  }

  // UniP: from level i to i + 1.
  at::Tensor Predict(const at::Tensor& x) const {
    const int i = step_;
    const float h = Lambda(i + 1) - Lambda(i), q = std::expm1(-h);
    at::Tensor next =
        x * (schedule_.sigmas[i + 1] / schedule_.sigmas[i]) - last_x0_ * (Alpha(i + 1) * q);
    if (order_ == 2) {
      const float r = (Lambda(i - 1) - Lambda(i)) / h;
      next = next - (previous_x0_ - last_x0_) * (Alpha(i + 1) * q * 0.5f / r);
    }
    return next;
  }

  const int max_order_;
  const std::vector<int> disable_corrector_;
  int step_ = 0;
  int order_ = 1;                     // of the last prediction
  at::Tensor last_x0_, previous_x0_;  // estimates of the clean sample at the last two steps
  at::Tensor last_sample_;            // the (corrected) sample of the last step
};

}  // namespace

std::unique_ptr<FlowSolver> MakeFlowSolver(const FlowSchedulerConfig& config, int num_steps) {
  FlowSchedule schedule =
      MakeFlowSchedule(config.grid, config.shift, num_steps, config.num_train_timesteps);
  if (config.solver == FlowSchedulerConfig::Solver::kEuler) {
    return std::make_unique<EulerSolver>(std::move(schedule));
  }
  return std::make_unique<UniPcSolver>(config, std::move(schedule));
}

}  // namespace dlo
