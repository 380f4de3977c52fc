#!/usr/bin/env bash
# Builds the extension with AddressSanitizer and UndefinedBehaviorSanitizer and runs the op, core and engine tests on it,
# and the C++ tests.
# Needs meson, ninja, nanobind and what the [test] extra names in the active environment. Arguments go to pytest; with
# --build alone it builds what they run on, and no more.
set -eu
cd "$(dirname "$0")/.."
build=build-sanitize
# -O0, but for the kernels, which have -O1 then, and lines without variables for the reports: compiling takes a third of
# the time. Left out is what is found by other checks: an access by a null pointer, beyond an object or behind an address
# that went round is one of an address that is not the program's.
checks=-fno-sanitize=null,object-size,pointer-overflow
[ -d "$build" ] || meson setup "$build" -Doptimization=0 -Ddebug=true -Dcpp_args="['-g1', '$checks']" -Db_sanitize=address,undefined -Db_lundef=false -Dcuda=disabled --prefix=/ -Dpython.install_env=prefix
meson install -C "$build" --quiet --destdir "$PWD/$build/root" --tags runtime,python-runtime
site=$(dirname "$(find "$build/root" -type d -name infinilm | head -n 1)")
export INFINILM_CPU_KERNELS=$(python tests/emulated_isas.py "$build/emulated" address)
export INFINILM_CPP_TESTS=$(python tests/dist/cpp_build.py "$build")
if [ "${1:-}" = --build ]; then exit; fi
# The interpreter is not instrumented, so the runtimes are preloaded; it also leaks by design, hence detect_leaks=0.
export LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so) $(g++ -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 OPENBLAS_NUM_THREADS=1
[ $# -gt 0 ] || set -- tests/ops tests/core tests/engine tests/dist/test_communicator.py::test_cpp
# pytest, not python -m pytest: that would put the source tree, which has no extension, in front. An editable install in
# the active environment would come before this build, too.
if python -c 'import _infinilm_editable_loader' 2>/dev/null; then
    echo "this environment has an editable install of infinilm, which would be tested instead: use another one" >&2
    exit 1
fi
PYTHONPATH="$PWD/$site" exec pytest -p no:cacheprovider --hypothesis-profile=sanitizers "$@"
