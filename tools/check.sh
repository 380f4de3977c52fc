#!/usr/bin/env bash
# What a change must pass before it is committed, besides its tests: lint, formats of Python and C++, types, stubs.
# Needs the [dev] extra in the active environment. All checks run, also behind one that fails.
set -u
cd "$(dirname "$0")/.."
failed=()
check() { echo "== $1"; shift; "$@" || failed+=("$*"); }
check "lint" ruff check .
check "format of Python" ruff format --check .
check "format of C++" env CLANG_FORMAT="$(command -v clang-format)" tools/format.sh --check
check "API page" python tools/api_page.py --check
check "stubs of the core" env PYTHON="$(command -v python)" tools/stubs.sh --check
check "types" mypy
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}"; exit 1; }
