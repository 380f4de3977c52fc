#!/usr/bin/env bash
# Writes infinilm/_core.pyi from the installed extension; with --check only compares and fails when it is out of date.
# The stub is kept in the repository, so that type checkers and readers have it without a build.
set -eu
cd "$(dirname "$0")/.."
python=$(command -v "${PYTHON:-python}") python=$(realpath -s "$python")
made=$(mktemp)
trap 'rm -f "$made"' EXIT
(cd / && "$python" -m nanobind.stubgen -q -m infinilm._core -o "$made")
if [ "${1:-}" = "--check" ]; then
    diff -u infinilm/_core.pyi "$made" || { echo "infinilm/_core.pyi is out of date: run tools/stubs.sh" >&2; exit 1; }
else
    cp "$made" infinilm/_core.pyi
fi
