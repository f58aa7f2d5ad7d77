#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a CUDA compiler with -Xptxas=-v. What ptxas says of every kernel is written beside the object, to OBJECT.ptxas,
# where tools/ptxas_report.py reads it; the rest is printed as it came. ccache, which may be the compiler here, repeats
# what the compiler said.
#   keep_ptxas.sh COMPILER ARGUMENT...
set -uo pipefail

object='' previous=''
for argument in "$@"; do
  if [[ $previous == -o ]]; then object=$argument; fi
  previous=$argument
done
if [[ $object != *.o ]]; then exec "$@"; fi

rm -f "$object.ptxas"
output=$("$@" -Xptxas=-v 2>&1)
status=$?
if ((status == 0)); then printf '%s\n' "$output" >"$object.ptxas"; fi
readonly usage='^ptxas info +: ([0-9]+ bytes gmem|Compiling entry|Function properties|Used |Compile time)'
grep -vE "$usage|^ +[0-9]+ bytes stack|^$" <<<"$output" >&2
exit "$status"
