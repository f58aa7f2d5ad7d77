# SPDX-License-Identifier: Apache-2.0
# The CUDA language for sm_90a. `tessera_cuda_all` is what `make cuda` builds: kernels, tests, benchmarks.
set(CMAKE_CUDA_COMPILER ${TESSERA_NVCC})
set(CMAKE_CUDA_ARCHITECTURES 90a-real)  # -gencode=arch=compute_90a,code=sm_90a
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc 13 has it
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
if(NOT TARGET CUDA::nvToolsExt)  # CMake 3.25 sets a property of it, and CUDA 13 has no such library
  add_library(CUDA::nvToolsExt INTERFACE IMPORTED)
endif()
find_package(CUDAToolkit REQUIRED)

add_custom_target(tessera_cuda_all)

# tessera_cuda_options(target): a spilled register is a warning. With TESSERA_WERROR any warning stops the build, but
# -Wrestrict, as GCC 12 reports std::string's operator+. What ptxas says of kernels is kept for tools/ptxas_report.py.
function(tessera_cuda_options target)
  set(launcher ${PROJECT_SOURCE_DIR}/cmake/keep_ptxas.sh ${CMAKE_CUDA_COMPILER_LAUNCHER})
  set_target_properties(${target} PROPERTIES CUDA_COMPILER_LAUNCHER "${launcher}")
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:
    -Xptxas=--warn-on-spills -Xcompiler=-Wall,-Wextra>)
  if(TESSERA_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:
      -Werror all-warnings -Xcompiler=-Werror,-Wno-restrict>)
  endif()
  target_include_directories(${target}
    PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
  target_link_libraries(${target} PRIVATE CUDA::cudart_static)
  add_dependencies(tessera_cuda_all ${target})
endfunction()
