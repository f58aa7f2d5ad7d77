#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# beside.sh FIRST SECOND: runs two shell commands side by side; fails if one of them does. If SECOND fails, FIRST is
# stopped; what FIRST says is shown when it ends.
set -uo pipefail
log=$(mktemp)
set -m  # FIRST is a process group of its own
bash -c "$1" >"$log" 2>&1 </dev/null &
first=$!
set +m
trap 'kill -- -$first 2>/dev/null; rm -f "$log"' EXIT
bash -c "$2" || exit
wait "$first"
status=$?
cat "$log" >&2
exit $status
