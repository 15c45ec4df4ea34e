#include <dlfcn.h>

#include "absl/strings/str_cat.h"
#include "runtime/cuda/nccl_communicator.h"

namespace dlo {

absl::StatusOr<std::unique_ptr<CommunicatorFactory>> OpenNcclFactory(RendezvousStore& store,
                                                                     const NcclOptions& options) {
  // Global and never closed, as in cuda_library.cc.
  void* library = dlopen("libdlo_cuda.so", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "collectives on cuda need libdlo_cuda.so, which is built where a CUDA 13 toolkit is "
        "installed: ",
        dlerror()));
  }
  auto open = reinterpret_cast<NcclOpenFunction>(dlsym(library, kNcclOpenSymbol));
  if (open == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "libdlo_cuda.so was built without NCCL, as nccl.h was not found: ", dlerror()));
  }
  std::string error;
  std::unique_ptr<CommunicatorFactory> factory(open(&store, &options, &error));
  if (factory == nullptr) return absl::FailedPreconditionError(error);
  return factory;
}

}  // namespace dlo
