"""`LoneTextBatches`: the batch of a short text of an encoder, which is computed while there is no other work."""

from __future__ import annotations

import numpy as np

from infinilm import _core
from infinilm.scheduling.block_manager import BlockManager
from infinilm.scheduling.sequence import Sequence

__all__ = ["MOST_TOKENS", "LoneTextBatches"]

# Tokens of the longest text that is short: a query. Longer ones take so long that the time of making a step is little,
# and a caller could not interrupt them.
MOST_TOKENS = 64


class LoneTextBatches:
    """Makes batches of one text each, and changes nothing that the scheduler knows.

    Keys and values of an encoder are of use within their step alone, so a text that nothing runs beside has the first
    blocks of the cache, which other texts may have had before.

    Parameters
    ----------
    blocks : BlockManager
        With one group of blocks; with several nothing is made.
    max_num_tokens : int
        Tokens that a step or a sequence has at most.
    """

    def __init__(self, blocks: BlockManager, max_num_tokens: int) -> None:
        (group, *others), size = blocks.groups, blocks.block_size
        self._most = 0 if others else min(MOST_TOKENS, max_num_tokens, group.num_blocks * size)
        self._block_size = size
        self._positions = np.arange(self._most, dtype=np.int32)
        self._slots = np.arange(self._most, dtype=np.int64)[None]
        self._blocks = np.arange(-(-self._most // size), dtype=np.int32)[None, None]

    def make(self, sequence: Sequence) -> _core.Batch | None:
        """The batch that collects the hidden states of a text; None: it is not short, or needs more than a batch."""
        ids = sequence.prompt_token_ids
        count = len(ids)
        if count > self._most or sequence.collect_hidden or sequence.adapter is not None or sequence.given is not None:
            return None
        cu_seqlens_q = np.array([0, count], np.int32)
        positions = self._positions[:count]
        return _core.Batch(
            input_ids=ids,
            positions=positions,
            slot_mapping=self._slots[:, :count],
            block_table=self._blocks[:, :, : -(-count // self._block_size)],
            cu_seqlens_q=cu_seqlens_q,
            context_lens=cu_seqlens_q[1:],
            logits_rows=positions,
            token_types=sequence.token_types,
            return_logits=True,
        )
