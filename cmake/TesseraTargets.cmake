# SPDX-License-Identifier: Apache-2.0
# Compile rules shared by all targets.

# Warnings stop the build with the compiler that CI uses, GCC 12; others warn of other things. Not where Tessera is a
# part of another project.
set(werror_default OFF)
if(PROJECT_IS_TOP_LEVEL AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  set(werror_default ON)
endif()
option(TESSERA_WERROR "Warnings stop the build" ${werror_default})

# Floating-point contraction is off: an FMA stands where the source says std::fma, so that a sequence has
# the same bits for every instruction set.
function(tessera_compile_options target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX,C>:-Wall -Wextra -Wpedantic -ffp-contract=off>)
  if(TESSERA_WERROR)
    # GCC 12 sees overflows that are not there in inlined parts of fmt and std::string.
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX,C>:-Werror -Wno-stringop-overflow -Wno-restrict>)
  endif()
  if(TESSERA_SANITIZE)
    # -O1 compiles much faster than -O2. -Wno-error: GCC warns wrongly about instrumented code.
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX,C>:-fsanitize=${TESSERA_SANITIZE} -fno-sanitize-recover=all
      -fno-omit-frame-pointer -O1 -g1 -Wno-error>)
    target_compile_definitions(${target} PRIVATE TESSERA_SANITIZED)
    target_link_options(${target} PUBLIC -fsanitize=${TESSERA_SANITIZE})
  endif()
endfunction()

# tessera_layer(name dirs...): a static library of every .cpp below the folders.
function(tessera_layer target)
  set(sources)
  foreach(folder IN LISTS ARGN)
    file(GLOB_RECURSE found CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/*.cpp)
    list(APPEND sources ${found})
  endforeach()
  add_library(${target} STATIC ${sources})
  tessera_compile_options(${target})
  target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR}/include PRIVATE ${PROJECT_SOURCE_DIR}/src)
endfunction()
