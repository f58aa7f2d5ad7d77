# SPDX-License-Identifier: Apache-2.0
# BLIS, serial build: GEMM with arbitrary row and column strides, thread-safe, no global state, no threads of
# its own; the program's dense layers and a bound of its benchmark. Linked statically. Gives Blis::Blis.
find_path(Blis_INCLUDE_DIR blis.h PATH_SUFFIXES blis-serial x86_64-linux-gnu/blis-serial blis)
find_library(Blis_LIBRARY NAMES libblis.a PATH_SUFFIXES blis-serial x86_64-linux-gnu/blis-serial)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Blis REQUIRED_VARS Blis_LIBRARY Blis_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "install libblis-serial-dev (Debian, Ubuntu)")
if(Blis_FOUND AND NOT TARGET Blis::Blis)
  add_library(Blis::Blis STATIC IMPORTED)
  set_target_properties(Blis::Blis PROPERTIES IMPORTED_LOCATION ${Blis_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${Blis_INCLUDE_DIR} INTERFACE_LINK_LIBRARIES "m;Threads::Threads")
endif()
mark_as_advanced(Blis_INCLUDE_DIR Blis_LIBRARY)
