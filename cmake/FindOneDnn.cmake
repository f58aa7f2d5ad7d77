# SPDX-License-Identifier: Apache-2.0
# oneDNN, the bound of the program's benchmark. Header and library alone: the package's own configuration asks for the
# headers of OpenCL, which it was built with and nothing here includes. Gives OneDnn::OneDnn.
find_path(OneDnn_INCLUDE_DIR oneapi/dnnl/dnnl.hpp)
find_library(OneDnn_LIBRARY NAMES dnnl)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(OneDnn REQUIRED_VARS OneDnn_LIBRARY OneDnn_INCLUDE_DIR)
if(OneDnn_FOUND AND NOT TARGET OneDnn::OneDnn)
  add_library(OneDnn::OneDnn SHARED IMPORTED)
  set_target_properties(OneDnn::OneDnn PROPERTIES IMPORTED_LOCATION ${OneDnn_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${OneDnn_INCLUDE_DIR})
endif()
mark_as_advanced(OneDnn_INCLUDE_DIR OneDnn_LIBRARY)
