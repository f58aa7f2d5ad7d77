#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# pkg_config.sh PKG_CONFIG LIBDIR CC SOURCE PROGRAM: compiles SOURCE with pkg-config's flags and runs it.
set -euo pipefail
export PKG_CONFIG_PATH=$2/pkgconfig
read -r -a flags <<<"$("$1" --cflags --libs tessera)"
"$3" -std=c11 -Wall -Werror "$4" -o "$5" "${flags[@]}" -lm "-Wl,-rpath,$2"
"$5"
