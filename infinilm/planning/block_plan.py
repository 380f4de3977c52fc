"""How the blocks of a KV cache are divided over layers that keep all keys and layers that keep a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinilm.scheduling.block_group import blocks_of_window

__all__ = ["BlockPlan", "divide_blocks", "least_of"]


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Blocks of the groups that `BlockManager` has, with its names."""

    num_blocks: int
    num_window_blocks: int = 0
    sliding_window: int = 0


def least_of(plans: Sequence[BlockPlan]) -> BlockPlan:
    """What the stages of a pipeline all have room for, each of which planned for itself."""
    num_blocks = min(plan.num_blocks for plan in plans)
    num_window_blocks = min(plan.num_window_blocks or plan.num_blocks for plan in plans)
    windows = [plan.sliding_window for plan in plans]
    if num_window_blocks == num_blocks:
        return BlockPlan(num_blocks, 0, min(windows))
    return BlockPlan(num_blocks, num_window_blocks, max(windows))


def divide_blocks(
    sliding_windows: Sequence[int],
    *,
    bytes_per_token: int,
    window_bytes_per_token: int,
    block_size: int,
    num_blocks: int,
    max_num_seqs: int,
    max_model_len: int,
    num_step_tokens: int,
    is_bounded: bool,
    takes_rest: bool,
) -> BlockPlan:
    """Divide the memory of `num_blocks` blocks of all layers.

    Layers with a window get blocks for the windows of `max_num_seqs` sequences and as many of prefixes, and for the
    tokens of a step; but no more than half of the memory, or what the others cannot use. So many short sequences, which
    lie within their windows, still find room. Where that saves nothing there is one group of all layers.

    Parameters
    ----------
    sliding_windows
        The window of each layer with attention; 0: it sees all keys.
    bytes_per_token, window_bytes_per_token
        Bytes of a token in all layers, and in those with a window.
    block_size
        Tokens.
    num_blocks
        That the memory has room for if they are of all layers.
    max_num_seqs, max_model_len, num_step_tokens
        Sequences that run at the same time, and tokens of each, and of a step, at most.
    is_bounded
        Whether there are no more blocks than all these sequences can fill.
    takes_rest
        Whether layers that keep all get what the others leave, or `num_blocks` blocks in any case.
    """
    of_sequence = -(-max_model_len // block_size)
    of_all = max_num_seqs * of_sequence
    most = min(num_blocks, of_all) if is_bounded else num_blocks
    window = max(sliding_windows, default=0)
    if all(sliding_windows):
        return BlockPlan(most, 0, window)
    of_window, of_step = blocks_of_window(window, block_size), -(-num_step_tokens // block_size)
    if not window or of_window >= of_sequence:
        return BlockPlan(most)
    num_full, num_window = most, min(2 * max_num_seqs * of_window + of_step, of_all)
    if takes_rest:
        # What follows counts in bytes of one token of each block.
        memory = num_blocks * bytes_per_token
        own_bytes, window_bytes = max(bytes_per_token - window_bytes_per_token, 1), max(window_bytes_per_token, 1)
        share = max(memory // 2, memory - of_all * own_bytes if is_bounded else 0)
        num_window = min(num_window, max(share // window_bytes, of_window + of_step))
        num_full = (memory - min(num_window, num_blocks) * window_bytes_per_token) // own_bytes
        num_full = min(num_full, of_all) if is_bounded else num_full
    return BlockPlan(num_full, num_window, window) if num_window < min(num_full, num_blocks) else BlockPlan(most)
