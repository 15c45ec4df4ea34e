# libtorch as scripts/bootstrap unpacks it from the PyPI wheel into .deps/torch, as imported targets:
#   Libtorch::torch_cpu   what the models and dlo-worker link; maps no CUDA driver
#   Libtorch::torch_cuda  what libdlo_cuda.so links on top
# TorchConfig.cmake of a CUDA wheel insists on a whole CUDA toolkit; the CPU half needs only libcudart and libcupti.
set(_root ${DLO_DEPS}/torch)

find_path(Libtorch_INCLUDE_DIR ATen/ATen.h PATHS ${_root}/include NO_DEFAULT_PATH)
find_library(Libtorch_CPU_LIBRARY torch_cpu PATHS ${_root}/lib NO_DEFAULT_PATH)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  Libtorch REQUIRED_VARS Libtorch_CPU_LIBRARY Libtorch_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "run scripts/bootstrap first")

if(Libtorch_FOUND AND NOT TARGET Libtorch::torch_cpu)
  function(_libtorch_import name)
    add_library(Libtorch::${name} SHARED IMPORTED GLOBAL)
    set_target_properties(Libtorch::${name} PROPERTIES IMPORTED_LOCATION ${_root}/lib/lib${name}.so)
  endfunction()
  _libtorch_import(c10)
  _libtorch_import(torch_cpu)
  target_include_directories(Libtorch::c10 SYSTEM INTERFACE
    ${Libtorch_INCLUDE_DIR} ${Libtorch_INCLUDE_DIR}/torch/csrc/api/include)
  target_link_libraries(Libtorch::torch_cpu INTERFACE Libtorch::c10)
  # at::parallel_for is a template that runs on one thread, silently, where OpenMP is off. The wheel's own runtime is linked, so that its
  # threads are shared.
  target_compile_options(Libtorch::c10 INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fopenmp>)
  target_link_libraries(Libtorch::c10 INTERFACE ${_root}/lib/libgomp.so.1)
  # .deps/cuda/lib: links to libcudart and libcupti, from the toolkit or from their wheels.
  target_link_options(Libtorch::c10 INTERFACE
    "-Wl,-rpath-link,${_root}/lib" "-Wl,-rpath-link,${DLO_DEPS}/cuda/lib")
  if(EXISTS ${_root}/lib/libtorch_cuda.so)
    _libtorch_import(c10_cuda)
    _libtorch_import(torch_cuda)
    target_link_libraries(Libtorch::torch_cuda INTERFACE Libtorch::torch_cpu Libtorch::c10_cuda)
  endif()
endif()
