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
# the same bits for every instruction set. Nobody reads the flags of floating-point exceptions: a loop that compares may
# become one of vectors.
function(tessera_compile_options target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX,C>:-Wall -Wextra -Wpedantic -ffp-contract=off -fno-trapping-math>)
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

# tessera_together(target files...): compiles these sources as one, so that what they include is compiled once. Names of
# their unnamed namespaces have to differ. clang-tidy sees files one by one.
function(tessera_together target)
  if(CMAKE_CXX_CLANG_TIDY)
    return()
  endif()
  list(GET ARGN 0 group)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  set_source_files_properties(${ARGN} PROPERTIES UNITY_GROUP ${group})
endfunction()

# tessera_precompile(target header...), or (target REUSE_FROM other) for the same options: compiles these headers once.
# clang-tidy does not read what another compiler precompiled.
function(tessera_precompile target)
  if(CMAKE_CXX_CLANG_TIDY)
    return()
  endif()
  if(ARGV1 STREQUAL "REUSE_FROM")
    target_precompile_headers(${target} ${ARGN})
  else()
    target_precompile_headers(${target} PRIVATE ${ARGN})
  endif()
  # The first is for ccache. GCC 12 forgets which precompiled lines are a system header's, and warns of std::string.
  target_compile_options(${target} PRIVATE
    "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-fpch-preprocess;-Wno-array-bounds>")
endfunction()

# tessera_unoptimised_if_sanitized(target): sanitizers see more without optimisation, at 0.6 of the time to compile.
function(tessera_unoptimised_if_sanitized target)
  if(TESSERA_SANITIZE)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O0>)
  endif()
endfunction()

# tessera_light(target): where nobody waits for the program, the compiler should not take long either. Goes before flags
# of the target's own. Two checks are a quarter of the time that a sanitized file takes: that of a null pointer, which
# ends the program anyway, and that of alignment, which is kept for the library.
function(tessera_light target)
  target_compile_options(${target} PRIVATE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O1>)
  tessera_unoptimised_if_sanitized(${target})
  if(TESSERA_SANITIZE)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize=null,alignment>)
  endif()
endfunction()

# tessera_loops(target): where a sanitized program is all loops, it would run longer than -O0 saves.
function(tessera_loops target)
  if(TESSERA_SANITIZE)
    # SHELL: for CMake leaves out an option that was there before.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:SHELL:-O1>)
    set_target_properties(${target} PROPERTIES DISABLE_PRECOMPILE_HEADERS ON)  # these were compiled without it
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
