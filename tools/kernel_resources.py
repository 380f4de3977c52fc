"""Registers and shared memory of every CUDA kernel, and rules for their machine code, read from the built library.

    python tools/kernel_resources.py            checks the rules
    python tools/kernel_resources.py --write    also writes the tables in docs/measurements/kernels.md, and which
                                                sources have passed into machine_code_passed.json
    python tools/kernel_resources.py --loops    prints what docs/measurements/kernels.md counts of each kernel's loop
    python tools/kernel_resources.py --passed   fails where the sources at hand, nvcc or the rules are not those that
                                                have passed, and names one that is another: .ci/run then builds them

Rules: no kernel touches local memory (spilled registers, indexed arrays); the linears for few tokens read weights in
16-byte loads or copies (in 8-byte ones where a format has no wider ones), and ask for the first before they wait for
the kernel in front; the Hopper linear multiplies with wgmma. Along every path, registers of wgmma are left alone from
its fence to the wait that covers it. From sm_90 on every kernel waits for the one in front, and no way through it,
whichever branches are taken, writes anything before, or reads what a kernel right in front may write: ptxas may move a
load across the wait, so that the sources do not tell.
Needs cuobjdump and nvdisasm, of the CUDA toolkit or from the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import cuda_sources
from cuda_sources import digest, digest_of, name_of
from sass import WGMMA, Kernel, asked_bytes, num_mma, read_kernels

PASSED = Path(__file__).with_name("machine_code_passed.json")  # {file of the project, or nvcc: digest}
DOCS = Path(__file__).parents[1] / "docs/measurements/kernels.md"
ALL_KERNELS, ATTENTION = "kernel resources", "attention registers"  # tables: <!-- name: begin --> .. <!-- name: end -->


# Kernels that read before they wait: the instructions, and the reason. Other memory may be output of the kernel in
# front.
READS_EARLY = {
    "attention_decode": (
        r"LDG\b|CCTL",
        "the list of work and the block table: the first kernels of a step bring them, in order",
    ),
    "delta_rule": (
        r"LDG\b",
        "the state: whatever writes it lies behind the embedding of the step, which starts in order",
    ),
    "selective_scan": (
        r"LDG\b",
        "the state, as the delta rule does",
    ),
    "linear_decode": (r"LDG\b.*\bCONSTANT|LDGSTS\b|CCTL", "weights"),
    "linear_sm90": (r"UTMALDG\b", "weights"),
    "linear_split_sm90": (r"UTMALDG\b", "weights"),
}
# Formats of linears for few tokens that have nothing of 16 bytes of a lane where weights go to registers.
NARROW = {"Q3_K": "planes of 8 and of 4 bytes, and three words of scales"}
WAIT = "ACQBULK"  # griddepcontrol.wait
# Reads of global memory: loads, copies to shared memory by threads, in bulk and by tensor maps, and their prefetches.
READS = re.compile(r"(LD|LDG|LDGMC|LDGSTS|UBLKCP|UTMALDG|UBLKPF|UTMAPF)\b|CCTL\..*PF")
# Stores, atomics, sums in memory. UBLKCP, which copies both ways, and UTMACCTL, of a tensor map, are none.
WRITES = re.compile(r"(ST|STG|RED|REDG|ATOM|ATOMG|UTMASTG|UTMAREDG|UBLKRED)\b")


def find_tool() -> str:
    folders = [
        os.environ["PATH"],
        str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"),
        *(str(p) for p in Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin")),
    ]
    os.environ["PATH"] = os.pathsep.join(folders)  # cuobjdump looks for nvdisasm there, too
    tool = shutil.which("cuobjdump")
    if not tool or not shutil.which("nvdisasm"):
        sys.exit("no cuobjdump and nvdisasm: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    return tool


def find_library() -> Path:
    spec = importlib.util.find_spec("infinilm")
    folder = Path(spec.origin).parent if spec and spec.origin else Path()
    library = folder / "libinfinilm_cuda.so"
    if not library.exists():
        sys.exit(f"no {library}: infinilm is not installed, or was built without nvcc; pass the library")
    return library


def demangle(names: list[str]) -> dict[str, str]:
    """`linear_decode<bf16, 2, 1, true>` for each mangled kernel."""
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    out = {}
    for name, full in zip(names, text.splitlines(), strict=True):
        short = re.sub(r"infinilm::cuda::|\(anonymous namespace\)::|\([^()]*\)$|^void ", "", full)
        out[name] = re.sub(r"_kernel\b", "", re.sub(r"\((?:int|bool)\)", "", short))
    return out


def read_usage(tool: str, library: Path) -> dict[str, dict[str, tuple[int, int]]]:
    """{kernel: {architecture: (registers, static shared bytes)}}."""
    text = subprocess.run([tool, "-res-usage", str(library)], capture_output=True, text=True, check=True).stdout
    usage: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    arch = kernel = ""
    for line in text.splitlines():
        if match := re.match(r"arch = (\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\w+):", line):
            kernel = match[1]
        elif match := re.match(r"\s*REG:(\d+) .*SHARED:(\d+)", line):
            usage[kernel][arch] = int(match[1]), int(match[2])
    return usage


def read_code(tool: str, library: Path) -> Iterator[str]:
    """The machine code of all kernels, line by line."""
    with subprocess.Popen([tool, "-sass", str(library)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield from process.stdout
    if process.returncode != 0:
        sys.exit(f"{tool} -sass {library} failed")


def check_code(lines: Iterable[str]) -> list[str]:
    """What breaks a rule."""
    kernels = list(read_kernels(lines))
    if not kernels:
        sys.exit("there is no machine code")
    names = demangle(sorted({kernel.name for kernel in kernels}))
    faults = []
    for kernel in kernels:
        name = f"{names[kernel.name]} ({kernel.arch})"
        found = {instruction.name for instruction in kernel.code}
        if local := {i for i in found if re.match(r"(LDL|STL)\b", i)}:
            faults.append(f"{name} touches local memory: {', '.join(sorted(local))}")
        bits = 64 if NARROW.keys() & set(re.findall(r"\w+", names[kernel.name])) else 128
        if names[kernel.name].startswith("linear_decode<") and not any(
            re.match(rf"LDG\..*\b(128|{bits})\.CONSTANT|LDGSTS\..*LTC256B\.128", i) for i in found
        ):
            faults.append(f"{name} reads weights in less than {bits // 8} bytes")
        if "_sm90<" in names[kernel.name] and not any(i.startswith(WGMMA) for i in found):
            faults.append(f"{name} has no wgmma ({' or '.join(WGMMA)})")
        faults += [f"{name}: {fault}" for fault in kernel.wgmma_faults()]
        if int(re.sub(r"\D", "", kernel.arch)) >= 90:
            faults += [f"{name} {fault}" for fault in check_wait(names[kernel.name], kernel)]
    print(f"{len(kernels)} kernels of {len({kernel.arch for kernel in kernels})} architectures checked")
    return faults


def check_wait(name: str, kernel: Kernel) -> Iterator[str]:
    """A write or a read to which a way leads that has not waited for the kernel in front; on one that always waits, in
    whatever order the compiler put it, there is none.
    """
    name = name.partition("<")[0]
    if not any(i.name.startswith(WAIT) for i in kernel.code):
        yield f"never waits for the kernel in front ({WAIT})"
        return
    early = {i.name for i in kernel.reached_before(WAIT)}
    if stores := sorted(i for i in early if WRITES.match(i)):
        yield f"writes before it waits: {', '.join(stores)}"
    reads = sorted(i for i in early if READS.match(i))
    allowed = READS_EARLY.get(name, ("$", ""))[0]
    if others := [i for i in reads if not re.match(allowed, i)]:
        yield f"reads before it waits: {', '.join(others)}"
    if name == "linear_decode" and not reads:
        yield "asks for no weight before it waits"


def made_from() -> dict[str, str]:
    """A digest of each source of the CUDA library with what it includes, and of all else that decides what is built and
    whether it passes.
    """
    sources = [*cuda_sources.all_sources(), *cuda_sources.host_sources()]
    rules = [cuda_sources.ROOT / name for name in ("cuda/meson.build", "tools/kernel_resources.py", "tools/sass.py")]
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return {
        "nvcc": digest(version.encode()),
        **{name_of(path): digest(path.read_bytes()) for path in rules},
        **{name_of(path): digest_of(path) for path in sources},
    }


def check_passed() -> None:
    passed = json.loads(PASSED.read_text()) if PASSED.exists() else {}
    now = made_from()
    if others := sorted(name for name in now.keys() | passed.keys() if now.get(name) != passed.get(name)):
        sys.exit(f"not what has passed, as {PASSED.name} tells: {', '.join(others)}")
    print(f"nvcc, {len(now) - 1} files and the rules are those that have passed, as {PASSED.name} tells")


def make_loop_table(kernels: Iterable[Kernel]) -> str:
    """The loop that has a kernel's work, by architecture: instructions (products of tensor cores, bytes of device
    memory that a thread asks for).
    """
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for kernel in kernels:
        loop = kernel.main_loop()
        found[kernel.name][kernel.arch] = f"{len(loop)} ({num_mma(loop)}, {asked_bytes(loop)})"
    names = demangle(sorted(found))
    archs = sorted({arch for cells in found.values() for arch in cells})
    rows = [["kernel", *archs], ["---"] * (1 + len(archs))]
    for kernel_name in sorted(found, key=lambda mangled: names[mangled]):
        rows.append([f"`{names[kernel_name]}`", *(found[kernel_name].get(arch, "") for arch in archs)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def make_table(usage: dict[str, dict[str, tuple[int, int]]]) -> str:
    """One row per kernel, template arguments of one kernel together: the range over its instances."""
    names = demangle(sorted(usage))
    archs = sorted({a for per_arch in usage.values() for a in per_arch})
    groups: dict[str, list[str]] = defaultdict(list)
    for mangled, name in names.items():
        groups[name.partition("<")[0]].append(mangled)

    def cell(values: list[int]) -> str:
        if not values:
            return ""
        return str(values[0]) if min(values) == max(values) else f"{min(values)} to {max(values)}"

    header = ["kernel", "instances", *(f"registers {a}" for a in archs), "static shared bytes"]
    rows = [header, ["---"] * len(header)]
    for name, members in sorted(groups.items()):
        per_arch = [[usage[m][a][0] for m in members if a in usage[m]] for a in archs]
        shared = [s for m in members for _, s in usage[m].values()]
        rows.append([f"`{name}`", str(len(members)), *map(cell, per_arch), cell(shared)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def make_attention_table(usage: dict[str, dict[str, tuple[int, int]]]) -> str:
    """Registers of the attention kernels of bf16, by head_dim; those of f16 are the same. Decode may have a part of the
    columns at a time, and a cache in 8 bits.
    """
    found: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for mangled, name in demangle(sorted(usage)).items():
        if match := re.fullmatch(r"attention_(decode|prefill)<bf16, (?:(bf16|.*char), )?(\d+)(?:, (\d+))?>", name):
            kernel = f"{match[1]} of 8 bits" if match[2] not in (None, "bf16") else match[1]
            if kernel == "decode" and match[4] != match[3]:
                kernel = "decode in parts"
            for arch, (registers, _) in usage[mangled].items():
                found[kernel, arch][int(match[3])] = registers
    widths = sorted({width for row in found.values() for width in row})
    rows = [["head_dim", *map(str, widths)], ["---"] * (1 + len(widths))]
    for (kernel, arch), row in sorted(found.items()):
        rows.append([f"{kernel}, {arch}", *(str(row.get(width, "")) for width in widths)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def replace_table(text: str, name: str, table: str) -> str:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = text.partition(begin)
    assert end in rest, f"{DOCS} has no {begin} .. {end}"
    return f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks the machine code of the CUDA kernels.")
    parser.add_argument("library", type=Path, nargs="?", help="default: that of the installed package")
    parser.add_argument("--write", action="store_true", help="write the tables in docs/measurements/kernels.md")
    parser.add_argument("--loops", action="store_true", help="print what is counted of loops, and check nothing")
    parser.add_argument("--passed", action="store_true", help=f"compare with {PASSED.name}, and read no library")
    args = parser.parse_args()
    if args.passed:
        check_passed()
        return
    tool, library = find_tool(), args.library or find_library()
    if args.loops:
        print(make_loop_table(read_kernels(read_code(tool, library))))
        return
    if args.write:
        usage = read_usage(tool, library)
        text = replace_table(DOCS.read_text(), ALL_KERNELS, make_table(usage))
        DOCS.write_text(replace_table(text, ATTENTION, make_attention_table(usage)))
    faults = check_code(read_code(tool, library))
    if faults:
        sys.exit("\n".join(faults))
    if args.write:
        PASSED.write_text(json.dumps(made_from(), indent=1) + "\n")


if __name__ == "__main__":
    main()
