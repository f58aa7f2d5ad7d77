#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# run.sh PROGRAM ARGUMENTS...: runs it; 77 (skipped) where the environment of the frameworks is missing.
case $1 in
*/bootstrap.sh)
  "$@" && exit 0
  echo "skipped: the packages of tools/requirements-frameworks.txt could not be installed (the lines above say why);" \
    "with a network, tools/bootstrap.sh frameworks installs them"
  exit 77
  ;;
esac
if ! [ -x "$1" ]; then
  echo "skipped: no $1; tools/bootstrap.sh frameworks makes it"
  exit 77
fi
unset PYTHONDONTWRITEBYTECODE
exec "$@"
