#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# run.sh PYTHON ARGUMENTS...: runs it; 77 (skipped) where that Python or its torch is missing.
if ! [ -x "$1" ] || ! "$1" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))'; then
  echo "skipped: no torch in $1; tools/bootstrap.sh python installs it"
  exit 77
fi
# What Python compiles lies in PYTHONPYCACHEPREFIX, which CMake sets, and is there for the next test.
unset PYTHONDONTWRITEBYTECODE
exec "$@"
