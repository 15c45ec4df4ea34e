#include "runtime/cuda/cuda_library.h"

#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "runtime/cuda/cuda_entry.h"

namespace dlo {

absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(int index) {
  // Global, so that libtorch's own registrations (which libdlo_cuda.so brings in) see one set of
  // symbols. Never closed: libtorch keeps pointers into it.
  void* library = dlopen("libdlo_cuda.so", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "device cuda needs libdlo_cuda.so, which is built where a CUDA 13 toolkit is installed: ",
        dlerror()));
  }
  auto open = reinterpret_cast<CudaOpenFunction>(dlsym(library, kCudaOpenSymbol));
  if (open == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("libdlo_cuda.so is of another build: ", dlerror()));
  }
  std::string error;
  std::unique_ptr<Device> device(open(index, &error));
  if (device == nullptr) return absl::FailedPreconditionError(error);
  return device;
}

}  // namespace dlo
