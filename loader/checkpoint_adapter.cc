#include "loader/checkpoint_adapter.h"

#include "loader/cast.h"

namespace dlo {

std::optional<Adaptation> KeptFloat32Adapter::Adapt(const TensorSpec& spec,
                                                    const SourceTensor& source) const {
  const bool kept = spec.dtype == DType::kF32 && run_ != DType::kF32;
  if (!kept || spec.shape != source.shape || !CanCast(source.dtype, spec.dtype)) {
    return std::nullopt;
  }
  return Adaptation{.adapter = "kept-float32/1", .runs = {}};
}

}  // namespace dlo
