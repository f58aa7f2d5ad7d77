#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# run.sh PYTHON [OPTION...] SCRIPT.py [ARGUMENT...]: runs it; 77 (skipped) where that Python or its torch is missing.
# Where TESSERA_PRELOADED is a socket of preloaded.py, that runs the script, but not what can have a GPU.
case $* in
*/cuda_*) for gpu in /dev/nvidia[0-9]*; do if [ -e "$gpu" ]; then unset TESSERA_PRELOADED; fi; done ;;
esac
if [ -S "${TESSERA_PRELOADED-}" ]; then
  python=$1
  until case $1 in *.py) true ;; *) false ;; esac; do shift; done
  exec "$python" -I -S -B "$(dirname "$0")/preloaded.py" run "$TESSERA_PRELOADED" "$@"
fi
if ! [ -x "$1" ] || ! "$1" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))'; then
  echo "skipped: no torch in $1; tools/bootstrap.sh python installs it"
  exit 77
fi
# What Python compiles lies in PYTHONPYCACHEPREFIX, which CMake sets, and is there for the next test.
unset PYTHONDONTWRITEBYTECODE
exec "$@"
