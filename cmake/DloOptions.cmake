# Language level, warnings, output folders, sanitizers, compiler cache.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
# Everywhere alike (CMake would give executables -fPIE): libraries and programs share a precompiled header.
add_compile_options(-fPIC)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

# A build tree finds libtorch in .deps and libdlo_cuda.so beside itself; an installed tree runs from any prefix.
set(DLO_DEPS ${CMAKE_SOURCE_DIR}/.deps CACHE PATH "Where scripts/bootstrap put what Debian does not have")
set(CMAKE_BUILD_RPATH ${CMAKE_BINARY_DIR}/lib ${DLO_DEPS}/torch/lib ${DLO_DEPS}/cuda/lib)
set(CMAKE_INSTALL_RPATH "$ORIGIN/../lib/dlo")

find_program(CCACHE ccache)
if(CCACHE)
  # The sloppiness is what ccache needs to serve files that use a precompiled header.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${CCACHE})
endif()

add_library(dlo_options INTERFACE)
target_include_directories(dlo_options INTERFACE ${CMAKE_SOURCE_DIR} ${CMAKE_BINARY_DIR}/gen)
target_compile_options(dlo_options INTERFACE -Wall -Wextra -Wno-unused-parameter
                                             -Wno-missing-field-initializers -Werror)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(dlo_options INTERFACE -fpch-preprocess)
elseif(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  target_compile_options(dlo_options INTERFACE -Wthread-safety)
endif()
if(DLO_SANITIZE)
  add_compile_options(-fsanitize=${DLO_SANITIZE} -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${DLO_SANITIZE})
  add_compile_definitions(DLO_SANITIZED)
  if(DLO_SANITIZE MATCHES "thread")
    # Classes of Debian's libprotobuf, which is not built with it, would have other members.
    add_compile_options(-U__SANITIZE_THREAD__ -D_GLIBCXX_TSAN=1)
    foreach(seen tsan_absl_mutex tsan_grpc)
      add_library(${seen} OBJECT ${CMAKE_SOURCE_DIR}/tests/support/${seen}.cc)
      target_compile_options(${seen} PRIVATE -fno-sanitize=thread)
    endforeach()
  endif()
endif()
