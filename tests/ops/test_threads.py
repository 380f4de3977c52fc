"""A Backend serves one thread at a time, and says so."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from infinilm import _core
from infinilm.errors import InfinilmError
from ops import support

PATIENCE = 300  # seconds, for what takes far less than one


def test_two_threads_on_one_backend() -> None:
    """The second one gets an error, and the first its result; both may go on one after the other."""
    b = _core.Backend("cpu", num_threads=2)
    logits = np.linspace(-1, 1, 64 * 50_000, dtype=np.float32).reshape(64, -1)
    stop, refused, wrong = threading.Event(), 0, 0
    deadline = threading.Timer(PATIENCE, stop.set)
    deadline.start()

    def work() -> None:
        nonlocal refused, wrong
        best, ids = np.zeros((64, 4), np.float32), np.zeros((64, 4), np.int32)
        while not stop.is_set():
            try:
                b.find_best(support.tensor(logits), support.tensor(best), support.tensor(ids))
            except InfinilmError as error:
                assert "this Backend is in use by another thread" in str(error)
                refused += 1
                if refused >= 20:
                    stop.set()
            else:
                wrong += bool((ids[:, 0] != 49_999).any())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive()
    deadline.cancel()
    assert refused >= 20 and wrong == 0
    with pytest.raises(InfinilmError, match="find_best"):
        b.find_best(support.tensor(logits), support.tensor(logits), support.tensor(logits))
    work_once = np.zeros((64, 1), np.int32)
    b.find_best(support.tensor(logits), support.tensor(np.zeros((64, 1), np.float32)), support.tensor(work_once))
    assert (work_once == 49_999).all()
