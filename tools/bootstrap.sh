#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes sure that what a verb needs is there, and installs what is missing where that is possible:
# system packages by apt on Debian and Ubuntu (as root or with sudo), Python tools in a private .venv.
# Says what it installs; prints nothing and touches no network when there is nothing to do.
#
#   tools/bootstrap.sh         compiler, CMake, Ninja, libraries: all that `make run` and `make test` need
#   tools/bootstrap.sh lint    the above and the pinned tools of tools/requirements-lint.txt
#   tools/bootstrap.sh python  the first and torch, transformers .. of tools/requirements-python.txt
#   tools/bootstrap.sh wheel   the first and what `make wheel` needs, of tools/requirements-wheel.txt
#   tools/bootstrap.sh frameworks  the first and, in .venv-frameworks, what tests/frameworks runs with
#                                  (tools/requirements-frameworks.txt: 3 GB)
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ -n ${TESSERA_SKIP_BOOTSTRAP:-} ]]; then exit 0; fi

readonly kMinimumCmake=3.25
readonly kMinimumGcc=12

say() { printf 'bootstrap: %s\n' "$*" >&2; }
have() { command -v "$1" >/dev/null 2>&1; }
# at_least A B: version A >= version B
at_least() { [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]; }

missing=()   # what is lacking, in words
packages=()  # the Debian packages that bring it
need() {
  missing+=("$1")
  packages+=("${@:2}")
}

check_commands() {
  have make || need make make
  have ninja || need ninja ninja-build
  have ccache || need ccache ccache
  have git || need git git
  have gnuplot || need gnuplot gnuplot-nox
  have pkg-config || need pkg-config pkg-config
  if ! have cmake; then need cmake cmake
  elif ! at_least "$(cmake --version | sed -n '1s/[^0-9]*//p')" $kMinimumCmake; then
    need "cmake >= $kMinimumCmake (found $(cmake --version | head -n 1))" cmake
  fi
  if ! have python3 || ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
    need 'python3 with venv' python3 python3-venv
  fi
}

# All headers in one run of the preprocessor: a library whose header is not found leaves its name.
check_libraries() {
  local compiler=${CXX:-c++} found line
  if ! have "$compiler"; then
    need 'C++20 compiler' g++ gcc
    need 'libraries (checked again once there is a compiler)' \
      libblis-serial-dev libdnnl-dev libcli11-dev nlohmann-json3-dev libfmt-dev libgtest-dev
    return
  fi
  found=$("$compiler" -E -P -x c++ - 2>/dev/null <<'PROBE' || true
#if defined(__GNUC__) && !defined(__clang__)
gcc __GNUC__
#endif
#if !__has_include(<blis-serial/blis.h>) && !__has_include(<blis/blis.h>)
missing BLIS libblis-serial-dev
#endif
#if !__has_include(<oneapi/dnnl/dnnl.h>)
missing oneDNN libdnnl-dev
#endif
#if !__has_include(<CLI/CLI.hpp>)
missing CLI11 libcli11-dev
#endif
#if !__has_include(<nlohmann/json.hpp>)
missing nlohmann-json nlohmann-json3-dev
#endif
#if !__has_include(<fmt/format.h>)
missing fmt libfmt-dev
#endif
#if !__has_include(<gtest/gtest.h>)
missing GoogleTest libgtest-dev
#endif
PROBE
  )
  while read -r word what package; do
    case $word in
      gcc) at_least "$what" $kMinimumGcc || need "g++ >= $kMinimumGcc (found $what)" g++ ;;
      missing) need "$what" "$package" ;;
    esac
  done <<<"$found"
}

supported_system() {
  have apt-get && [[ -r /etc/os-release ]] || return 1
  local ID='' VERSION_ID=''
  # shellcheck disable=SC1091
  . /etc/os-release
  { [[ $ID == debian ]] && at_least "$VERSION_ID" 12; } ||
    { [[ $ID == ubuntu ]] && at_least "$VERSION_ID" 24.04; }
}

give_up() {
  say "$1. Please install:"
  printf '  %s\n' "${missing[@]}" >&2
  say "on Debian 12 or Ubuntu 24.04: apt-get install ${packages[*]}"
  say 'elsewhere: the same libraries from your own package manager (BLIS: static, serial, libblis.a);'
  say 'with everything in a place of your own, set CMAKE_PREFIX_PATH and TESSERA_SKIP_BOOTSTRAP=1'
  exit 3
}

install_packages() {
  supported_system || give_up 'this system is neither Debian >= 12 nor Ubuntu >= 24.04'
  local as_root=()
  if [[ $(id -u) -ne 0 ]]; then
    have sudo || give_up 'neither root nor sudo'
    as_root=(sudo)
    # Without a terminal nobody can type a password.
    if [[ ! -t 0 ]]; then as_root=(sudo -n); fi
    "${as_root[@]}" true 2>/dev/null || give_up 'not root, and sudo is refused'
  fi
  say "missing: ${missing[*]}"
  say "installing by apt: ${packages[*]}"
  local log start=$SECONDS
  log=$(mktemp)
  if ! { "${as_root[@]}" apt-get update &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y --no-install-recommends "${packages[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    give_up 'apt-get failed'
  fi
  rm -f "$log"
  say "installing by apt took $((SECONDS - start)) s"
}

# pip_install FOLDER REQUIREMENTS-NAME ARGUMENTS... Python compiles what it loads, when it does; most is never loaded.
pip_install() {
  "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -r "tools/$2.txt" "${@:3}"
}

# install_python lint|python|wheel|frameworks. The stamp holds the requirements that the environment was made from.
install_python() {
  local name=requirements-$1 folder=.venv
  if [[ $1 == frameworks ]]; then folder=.venv-frameworks; fi
  local requirements=tools/$name.txt stamp=$folder/$name.txt
  if cmp -s "$requirements" "$stamp"; then return; fi
  local start=$SECONDS
  say "installing into $folder: $(grep -v '^#' "$requirements" | tr '\n' ' ')"
  [[ -x $folder/bin/python ]] || python3 -m venv "$folder"
  # The CPU build of torch is on its project's own index, unless the machine is configured for another.
  pip_install "$folder" "$name" 2>/dev/null ||
    pip_install "$folder" "$name" --extra-index-url https://download.pytorch.org/whl/cpu
  cp "$requirements" "$stamp"
  say "installing into $folder took $((SECONDS - start)) s"
}

# megatron-core's wheels of today are for Python 3.12 and later. The sources in them load in older ones too, and are
# what tests/frameworks runs, so they are unpacked beside the packages of whatever Python there is.
install_megatron() {
  local requirements=tools/requirements-megatron.txt folder=.venv-frameworks/megatron
  if cmp -s "$requirements" "$folder/requirements.txt"; then return; fi
  say "unpacking into $folder: $(grep -v '^#' "$requirements")"
  .venv-frameworks/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade \
    --python-version 3.12 --ignore-requires-python --only-binary=:all: --target "$folder" -r "$requirements"
  cp "$requirements" "$folder/requirements.txt"
}

check_commands
check_libraries
if ((${#missing[@]})); then
  install_packages
  missing=() packages=()
  check_commands
  check_libraries
  if ((${#missing[@]})); then give_up 'still missing after the installation'; fi
  say 'done'
fi
if (($#)); then install_python "$1"; fi
if [[ ${1:-} == frameworks ]]; then install_megatron; fi
