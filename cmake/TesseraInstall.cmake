# SPDX-License-Identifier: Apache-2.0
# The installed tree: library, headers, find_package(Tessera) with target tessera::tessera, pkg-config.
# Relocatable: the folder may be moved after the installation.
include(CMakePackageConfigHelpers)
set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Tessera)

install(TARGETS tessera EXPORT TesseraExports
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES LICENSE THIRD_PARTY_NOTICES DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/Tessera)

install(EXPORT TesseraExports NAMESPACE tessera:: DESTINATION ${config_dir})
configure_package_config_file(cmake/TesseraConfig.cmake.in TesseraConfig.cmake
  INSTALL_DESTINATION ${config_dir})
# Before 1.0 a minor version may break the interface.
write_basic_package_version_file(TesseraConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake DESTINATION ${config_dir})

cmake_path(RELATIVE_PATH CMAKE_INSTALL_PREFIX
  BASE_DIRECTORY ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig OUTPUT_VARIABLE relative_prefix)
configure_file(cmake/tessera.pc.in tessera.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/tessera.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# The Python package (pyproject.toml) carries the library beside its modules; wheels hold no symbolic links.
install(FILES $<TARGET_FILE:tessera> DESTINATION tessera RENAME libtessera.so
  COMPONENT python EXCLUDE_FROM_ALL)
