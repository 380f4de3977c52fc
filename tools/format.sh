#!/usr/bin/env bash
# Formats the C++ sources in place; with --check only looks and fails when something would change.
set -eu
cd "$(dirname "$0")/.."
mode=(-i)
[ "${1:-}" = "--check" ] && mode=(--dry-run --Werror)
git ls-files -z --cached --others --exclude-standard 'src/*.h' 'src/*.cpp' 'tests/*.h' 'tests/*.cpp' 'tests/*.cu' 'bench/*.cpp' 'bench/*.cu' 'cuda/*.h' 'cuda/*.cpp' 'cuda/*.cu' 'cuda/*.cuh' | xargs -0 "${CLANG_FORMAT:-clang-format}" "${mode[@]}"
