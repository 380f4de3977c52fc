#!/usr/bin/env bash
# Tries wheels of another architecture under qemu: tools/wheels/try_foreign.sh aarch64 PIP WHEEL..
# The Pythons are Debian's for that architecture, of the two newest releases, unpacked beside the system and not installed:
# each tries the wheels that it can install, with the C++ library that numpy asks for. Needs apt-get with Debian's sources, and qemu-user.
set -euo pipefail
arch=$1 pip=$2
shift 2
declare -A debian=([aarch64]=arm64 [x86_64]=amd64)
smoke=$(realpath "$(dirname "$0")/../smoke.py")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
tried=0

# unpack SUITE VERSION: a root with that Python. Packages of another release come through lists of their own.
unpack() {
    local suite=$1 version=$2 root=$folder/$1 codename
    codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
    mkdir -p "$root"/apt/{sources,lists/partial,cache/archives/partial} "$root/debs"
    cp /etc/apt/sources.list.d/*.sources "$root/apt/sources/" 2>/dev/null || true
    if [ -s /etc/apt/sources.list ]; then cp /etc/apt/sources.list "$root/apt/sources/main.list"; fi
    sed -i "s/$codename/$suite/g" "$root"/apt/sources/*
    local options=(-oAPT::Architecture="${debian[$arch]}" -oAPT::Architectures="${debian[$arch]}" -oDir::State::Lists="$root/apt/lists"
        -oDir::Etc::sourcelist=/dev/null -oDir::Etc::sourceparts="$root/apt/sources" -oDir::Cache="$root/apt/cache"
        -oAPT::Sandbox::User=root)
    apt-get -q "${options[@]}" update >/dev/null
    local ssl=libssl3
    if [ "$suite" = trixie ]; then ssl=libssl3t64; fi
    (cd "$root/debs" && apt-get -q "${options[@]}" download "python$version-minimal" "libpython$version-minimal" \
        "libpython$version-stdlib" libc6 libexpat1 zlib1g $ssl libffi8 libsqlite3-0 libgcc-s1 libstdc++6 libbz2-1.0 liblzma5 libzstd1 \
        libuuid1 >/dev/null)
    for package in "$root"/debs/*.deb; do dpkg -x "$package" "$root"; done
    if [ ! -e "$root/lib" ]; then ln -s usr/lib "$root/lib"; fi
}

for release in bookworm:3.11 trixie:3.13; do
    suite=${release%:*} version=${release#*:}
    case $version in 3.11) wanted=cp311-cp311 ;; *) wanted=abi3 ;; esac
    for wheel in "$@"; do
        case $wheel in *"$wanted"*) ;; *) continue ;; esac
        echo "=== Python $version of $arch under qemu: try $(basename "$wheel")"
        unpack "$suite" "$version"
        "$pip" install -q --target "$folder/$suite/site" --platform "manylinux_2_28_$arch" --platform "manylinux2014_$arch" \
            --python-version "$version" --implementation cp --only-binary=:all: "$wheel"
        root=$folder/$suite
        "qemu-$arch" -L "$root" -E PYTHONPATH="$root/site" "$root/usr/bin/python$version" -W error "$smoke"
        rm -rf "$root"
        tried=$((tried + 1))
    done
done
[ "$tried" -gt 0 ] || { echo "none of these wheels is for a Python that is tried: $*" >&2; exit 1; }
