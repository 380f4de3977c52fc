"""All builds that fuse products and sums give the bits of AVX2 in every op: the wider ones, and those with tiles (AMX).

tests/ops/test_aarch64.py compares NEON.
"""

from __future__ import annotations

import pytest

from infinilm import _core
from ops import support
from ops.fused_ops import attention, block_rows, layers_with_a_state, linears, linears_of_blocks, rows

COUNTS = (1, 16, 17, 33, 100, 257)  # tokens: below what tiles take at a time, and with a rest of it
WIDER = [isa for isa in ("avx512", "avx512_vnni", "avx512_bf16", "amx") if isa in _core.cpu_isas()]


@pytest.mark.skipif("avx2" not in _core.cpu_isas(), reason="needs AVX2 to compare with")
@pytest.mark.parametrize("isa", WIDER)
def test_wider_builds_have_the_bits_of_avx2(isa: str) -> None:
    made = block_rows()
    narrow, wide = support.backend("avx2"), support.backend(isa)
    for op in (attention, layers_with_a_state, rows):
        support.assert_bitwise(op(wide), op(narrow), op.__name__)
    support.assert_bitwise(linears(wide, COUNTS), linears(narrow, COUNTS), "linears")
    support.assert_bitwise(linears_of_blocks(wide, made, COUNTS), linears_of_blocks(narrow, made, COUNTS), "blocks")
