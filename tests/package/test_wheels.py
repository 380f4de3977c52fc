"""What wheels are linked with: the C library of 2018, whatever system builds them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools" / "wheels"
_spec = importlib.util.spec_from_file_location("check_wheel", TOOLS / "check.py")
assert _spec is not None and _spec.loader is not None
check = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check)

# Each line asks for a symbol that the C library has had in this form since after 2.28, or that libstdc++ asks for.
PROGRAM = """
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <dlfcn.h>
#include <filesystem>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>

thread_local int calls = 0;

int main(int count, char**) {
    std::mutex mutex;
    std::condition_variable condition;
    bool woken = false;
    std::unique_lock lock(mutex);
    using namespace std::chrono_literals;
    if (condition.wait_for(lock, 0s, [&] { return woken; })) return 1;
    if (condition.wait_for(lock, 1ms, [&] { return woken; })) return 2;
    std::thread other([&] {
        const std::lock_guard guard(mutex);
        woken = true;
        condition.notify_all();
    });
    if (!condition.wait_for(lock, 1h, [&] { return woken; })) return 3;
    lock.unlock();
    other.join();
    if (!std::filesystem::is_directory("/") || std::filesystem::exists("/no such file")) return 4;
    if (std::filesystem::file_size("/proc/self/exe") < 1000) return 5;
    std::random_device device;
    if (device() == device() && device() == device()) return 6;
    if (!dlsym(RTLD_DEFAULT, "malloc")) return 7;
    try {
        calls += count;
        throw std::runtime_error("caught");
    } catch (const std::exception& error) {
        std::printf("%s %.3f", error.what(), std::exp(std::log(double(count))) + calls - 1);
    }
}
"""


@pytest.fixture(scope="module")
def sysroot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sysroot")
    machine = subprocess.run(["uname", "-m"], check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run([sys.executable, TOOLS / "sysroot.py", machine, folder], check=True)
    return folder


def versions(library: Path) -> set[tuple[int, ...]]:
    symbols = subprocess.run(
        ["readelf", "-W", "--dyn-syms", library], check=True, capture_output=True, text=True
    ).stdout
    return {tuple(map(int, version.split("."))) for version in re.findall(r"@GLIBC_([\d.]+)", symbols)}


@pytest.mark.parametrize("kind", [["-no-pie"], ["-fPIE", "-pie"], ["-fPIC", "-shared"]], ids=["exe", "pie", "library"])
def test_links_with_old_symbols(sysroot: Path, tmp_path: Path, kind: list[str]) -> None:
    source, output = tmp_path / "program.cpp", tmp_path / "program"
    source.write_text(PROGRAM)
    command = ["-std=c++20", "-O1", "-pthread", *kind, source, "-o", output, "-ldl"]
    subprocess.run([sysroot / "g++", *command], check=True)
    assert max(versions(output)) <= (2, 28)
    dynamic = subprocess.run(["readelf", "-d", output], check=True, capture_output=True, text=True).stdout
    assert "libstdc++" not in dynamic
    if "-shared" not in kind:
        result = subprocess.run([output], check=True, capture_output=True, text=True)
        assert result.stdout == "caught 1.000"
    else:
        needed = set(re.findall(r"NEEDED.*\[(lib\w+)", dynamic))
        assert {"libpthread", "libdl", "librt"} <= needed  # they are parts of libc since 2.34 alone
        assert not check.unversioned(output.read_bytes())
    subprocess.run(["g++", *command], check=True)  # it is the stubs that make the difference
    assert max(versions(output)) > (2, 28)


def test_what_is_newer_than_the_stubs_is_found(sysroot: Path, tmp_path: Path) -> None:
    """The linker lets it through, and auditwheel reads versions alone."""
    source, output = tmp_path / "program.cpp", tmp_path / "library.so"
    source.write_text('extern "C" int pthread_mutex_clocklock(void*, int, const void*);\n')
    source.write_text(source.read_text() + "int lock(void* m) { return pthread_mutex_clocklock(m, 1, nullptr); }\n")
    subprocess.run([sysroot / "g++", "-fPIC", "-shared", source, "-o", output], check=True)
    assert check.unversioned(output.read_bytes()) == ["pthread_mutex_clocklock"]
