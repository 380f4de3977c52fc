"""How the blocks of a cache are divided over layers that keep all keys and layers that keep a window."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st

from infinilm.planning.block_plan import BlockPlan, divide_blocks, least_of
from infinilm.scheduling.block_group import blocks_of_window

CASES: dict[str, Any] = {
    "window": st.integers(1, 600),
    "own_bytes": st.integers(1, 50),
    "window_bytes": st.integers(1, 300),
    "block_size": st.sampled_from([1, 4, 16]),
    "num_blocks": st.integers(1, 5000),
    "max_num_seqs": st.integers(1, 70),
    "max_model_len": st.integers(1, 4000),
    "num_step_tokens": st.integers(1, 2048),
    "is_bounded": st.booleans(),
}


def divide(*windows: int, is_bounded: bool = False, takes_rest: bool = True, **case: int) -> BlockPlan:
    own, window_bytes = case.pop("own_bytes"), case.pop("window_bytes")
    memory: dict[str, int] = {"bytes_per_token": own + window_bytes, "window_bytes_per_token": window_bytes}
    return divide_blocks(windows, **memory, **case, is_bounded=is_bounded, takes_rest=takes_rest)


@given(**CASES)
def test_nothing_is_lost_by_a_second_group(window: int, own_bytes: int, window_bytes: int, **case: Any) -> None:
    plan = divide(window, 0, window // 2 + 1, own_bytes=own_bytes, window_bytes=window_bytes, **case)
    memory, size = case["num_blocks"] * (own_bytes + window_bytes), case["block_size"]
    most = case["max_num_seqs"] * -(-case["max_model_len"] // size) if case["is_bounded"] else 1 << 60
    assert min(case["num_blocks"], most) <= plan.num_blocks <= most  # no shorter sequences than with one group
    if not plan.num_window_blocks:
        assert plan == BlockPlan(min(case["num_blocks"], most))
        return
    assert plan.sliding_window == window
    assert plan.num_blocks * own_bytes + plan.num_window_blocks * window_bytes <= memory
    of_window = blocks_of_window(window, size)
    # One sequence and a step of it always fit, and more is never wanted than all sequences can use.
    assert of_window + -(-case["num_step_tokens"] // size) <= plan.num_window_blocks or (
        plan.num_window_blocks == case["max_num_seqs"] * -(-case["max_model_len"] // size)
    )
    assert plan.num_window_blocks < min(plan.num_blocks, case["num_blocks"])
    assert of_window < -(-case["max_model_len"] // size)


def test_examples() -> None:
    # As Gemma 3 27B, where five of six layers have a window: half of the memory is theirs, or what they can use.
    case = {"own_bytes": 10, "window_bytes": 50, "block_size": 16, "max_model_len": 131072, "num_step_tokens": 2048}
    assert divide(1024, 0, num_blocks=9000, max_num_seqs=64, **case) == BlockPlan(27000, 5400, 1024)
    assert divide(1024, 0, num_blocks=9000, max_num_seqs=8, **case) == BlockPlan(48160, 2 * 8 * 65 + 128, 1024)
    assert divide(1024, 0, num_blocks=100, max_num_seqs=8, **case) == BlockPlan(100)  # less than a window and a step
    # The number of blocks is given: it is that of layers that keep all.
    assert divide(1024, 0, num_blocks=9000, max_num_seqs=8, **case, takes_rest=False) == BlockPlan(9000, 1168, 1024)
    # Others have what they can use, and layers with a window the rest.
    short = case | {"max_model_len": 2048}
    assert divide(1024, 0, num_blocks=450, max_num_seqs=4, is_bounded=True, **short) == BlockPlan(512, 437, 1024)
    assert divide(1024, 0, num_blocks=600, max_num_seqs=4, is_bounded=True, **short) == BlockPlan(512)
    # A stage that has none of the layers with a window keeps all its blocks.
    assert divide(1024, 0, num_blocks=9000, max_num_seqs=8, **case | {"window_bytes": 0}).num_blocks == 9000
    # All layers have a window, or none.
    assert divide(1024, 512, num_blocks=900, max_num_seqs=8, **case) == BlockPlan(900, 0, 1024)
    assert divide(0, 0, num_blocks=900, max_num_seqs=8, **case) == BlockPlan(900)
    assert divide(1024, 0, num_blocks=900, max_num_seqs=8, **case | {"max_model_len": 1000}) == BlockPlan(900)


def test_stages_agree_on_what_all_have() -> None:
    assert least_of([BlockPlan(9, 4, 32), BlockPlan(7, 5, 32)]) == BlockPlan(7, 4, 32)
    assert least_of([BlockPlan(9), BlockPlan(12, 5, 32)]) == BlockPlan(9, 5, 32)
    assert least_of([BlockPlan(4), BlockPlan(12, 5, 32)]) == BlockPlan(4)
    assert least_of([BlockPlan(9, 0, 32), BlockPlan(7, 0, 32)]) == BlockPlan(7, 0, 32)
