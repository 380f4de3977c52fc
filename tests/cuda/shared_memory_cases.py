"""What kernels ask of a device: every one launched at its largest shapes, which the simulated device checks only."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
from dataclasses import dataclass

from attention_cases import Case, Problem
from emulation import Gpu

# Bytes of a block, by compute capability (CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability").
MOST_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# Kernels that have variables in shared memory, too, beside what is dynamic, which begins at a multiple of 1024 then.
DECLARING = re.compile(r"(attention_(decode|wide|sm90)|delta_rule|linear_(grouped_)?sm90|one_shot|two_shot)_kernel")


@dataclass(frozen=True)
class Launched:
    """A launch of a kernel."""

    count: int
    most_shared_bytes: int  # dynamic


def take_launches(gpu: Gpu) -> dict[str, Launched]:
    """The kernels that were loaded or launched since the last call."""
    gpu.lib.infinilm_emulator_take_launches.restype = ctypes.c_char_p
    lines = gpu.lib.infinilm_emulator_take_launches().decode().splitlines()
    return {name: Launched(int(count), int(most)) for name, count, most in (line.rsplit("\t", 2) for line in lines)}


def every_launch_fits(gpu: Gpu) -> None:
    """On every compute capability; and no kernel is left out: each is launched on one of them."""
    gpu.lib.launch_all.restype = ctypes.c_char_p
    idle: set[str] | None = None
    for capability, kib in MOST_KIB.items():
        for sms in (4, 132):
            os.environ |= {"INFINILM_EMULATOR_CC": str(capability), "INFINILM_EMULATOR_SMS": str(sms)}
            take_launches(gpu)
            gpu.check(gpu.lib.load_kernels())
            refused = gpu.lib.launch_all().decode()
            assert not refused, f"on a device of {capability}: {refused}"
            launches = take_launches(gpu)
            for name, launched in launches.items():
                needed = launched.most_shared_bytes + (1024 if DECLARING.search(name) else 0)
                assert needed <= kib << 10, f"{capability}: {name} takes {needed} bytes of shared memory"
            unused = {name for name, launched in launches.items() if launched.count == 0}
            idle = unused if idle is None else idle & unused
    assert not idle, f"never launched: {idle}"


def same_bits_everywhere(gpu: Gpu, head_dim: int, value_dim: int, kind: str) -> None:
    """Wide heads and latents on devices with less shared memory: against float64, and as on a Hopper GPU."""
    sequences = ((300, 1), (150, 9), (5, 5), (40, 3))
    problem = Problem(gpu, Case(kind, (11, 1), head_dim, sequences, 16, 0, 8, value_dim=value_dim))
    want, kernels = None, {}
    for capability in (90, 80, 89):
        os.environ["INFINILM_EMULATOR_CC"] = str(capability)
        take_launches(gpu)
        got = [problem.run(problem.whole(), num_sms=sms) for sms in (4, 1000)]  # with and without tiles of prefill
        kernels[capability] = {name for name, launched in take_launches(gpu).items() if launched.count}
        if want is None:
            want = got
            problem.check(got[0])
        for bits, expected in zip(*(itertools.chain.from_iterable(x) for x in (got, want)), strict=True):
            assert bits.tobytes() == expected.tobytes(), capability
    assert kernels[90] != kernels[89], "the devices have the same kernels"
