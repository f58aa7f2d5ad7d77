# SPDX-License-Identifier: Apache-2.0
# The CUDA language for the GPUs of TESSERA_CUDA_ARCHS. `tessera_cuda_all` is what `make cuda` builds: kernels, tests,
# benchmarks.
set(CMAKE_CUDA_COMPILER ${TESSERA_NVCC})
set(known_archs 90a 100a)
set(tessera_cuda_architectures "")  # of kernels that every GPU runs
foreach(arch IN LISTS known_archs)
  if(arch IN_LIST TESSERA_CUDA_ARCHS)
    list(APPEND tessera_cuda_architectures ${arch}-real)  # -gencode=arch=compute_90a,code=sm_90a
    set(TESSERA_HAS_SM${arch} ON)
  else()
    set(TESSERA_HAS_SM${arch} OFF)
  endif()
endforeach()
set(unknown_archs ${TESSERA_CUDA_ARCHS})
list(REMOVE_ITEM unknown_archs ${known_archs})
if(unknown_archs OR NOT tessera_cuda_architectures)
  message(FATAL_ERROR "TESSERA_CUDA_ARCHS=${TESSERA_CUDA_ARCHS}: there are kernels for 90a and 100a; name one or both, "
    "as in -DTESSERA_CUDA_ARCHS='90a;100a'")
endif()
# Tests and benchmarks have kernels of their own for one of them.
list(GET tessera_cuda_architectures 0 CMAKE_CUDA_ARCHITECTURES)
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

# tessera_on_every_gpu(target): its kernels are compiled for all GPUs of the build.
function(tessera_on_every_gpu target)
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${tessera_cuda_architectures}")
endfunction()
