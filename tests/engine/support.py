"""Engines of the tests of the engine layer, and what a request gives when it runs alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infinilm import InferEngine, StaticKVCacheConfig
from infinilm.cache import CacheConfig


def make_engine(folder: Path, cache_config: CacheConfig | None = None) -> InferEngine:
    engine = InferEngine(folder, device_type="cpu", cache_config=cache_config)
    engine.load_weights(folder, use_tqdm=False)
    return engine


class Alone:
    """Runs one request at a time in an engine of its own: what everything else is held against, bit for bit."""

    def __init__(self, folder: Path) -> None:
        self.engine = make_engine(folder, StaticKVCacheConfig())

    def logits(self, tokens: Any, **fields: Any) -> NDArray[np.float32]:
        """[vocab_size] of the last token."""
        output = self.engine.forward(InferEngine.Input([list(tokens)], **fields), return_logits=True)
        assert output.logits is not None
        return output.logits.numpy()[0].copy()


def run(engine: InferEngine, **fields: Any) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Sampled ids [num_requests] and logits [num_requests, vocab_size]."""
    output = engine.forward(InferEngine.Input(**fields), return_logits=True)
    assert output.logits is not None
    return output.output_ids.numpy().copy(), output.logits.numpy().copy()


class Foreign:
    """An array that says it is on a GPU."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("nobody may ask for it")
