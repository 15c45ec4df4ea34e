# What `cmake --install BUILD --prefix P` lays out; the tree can be moved afterwards:
#   P/bin        dlo-serve, dlo-worker, dlo-client, dlo-weights
#   P/lib/dlo    libtorch and the libraries it brings, libdlo_cuda.so where it was built
#   P/share/dlo  the demo model, which dlo-serve serves when told no other
foreach(program dlo-serve dlo-worker dlo-client dlo-weights)
  if(TARGET ${program})
    install(TARGETS ${program} RUNTIME DESTINATION bin)
  endif()
endforeach()

if(DLO_TORCH)
  set(libraries ${DLO_DEPS}/torch/lib/libtorch_cpu.so ${DLO_DEPS}/torch/lib/libc10.so
                ${DLO_DEPS}/torch/lib/libgomp.so.1)
  set(cuda_libraries ${DLO_DEPS}/cuda/lib/libcudart.so.13 ${DLO_DEPS}/cuda/lib/libcupti.so.13)
  if(TARGET dlo_cuda)
    set_target_properties(dlo_cuda PROPERTIES INSTALL_RPATH "$ORIGIN")
    install(TARGETS dlo_cuda LIBRARY DESTINATION lib/dlo)
    list(APPEND libraries ${DLO_DEPS}/torch/lib/libtorch_cuda.so ${DLO_DEPS}/torch/lib/libc10_cuda.so
         ${DLO_DEPS}/torch/lib/libtorch_cuda_linalg.so ${DLO_DEPS}/torch/lib/libtorch_nvshmem.so)
    file(GLOB extra ${DLO_DEPS}/cuda/lib/*.so*)
    list(APPEND cuda_libraries ${extra})
    list(REMOVE_DUPLICATES cuda_libraries)
  endif()
  foreach(library ${libraries} ${cuda_libraries})
    file(REAL_PATH ${library} real)  # .deps/cuda/lib may hold links into the toolkit
    get_filename_component(name ${library} NAME)
    install(FILES ${real} DESTINATION lib/dlo RENAME ${name})
  endforeach()
endif()

install(DIRECTORY assets/shapes DESTINATION share/dlo)
