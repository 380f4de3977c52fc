"""The soak in short: requests leave neither objects nor memory behind."""

from __future__ import annotations

from bench import soak

# In so few requests the allocator is not at rest: 200 to 700 bytes a request were seen. One that stayed costs 9,700.
BYTES_PER_REQUEST = 2500


def test_requests_leave_nothing_behind() -> None:
    with soak.load() as llm:
        before = soak.count_objects()  # of other tests, which keep results
        readings = list(soak.soak(llm, 1500, 150))
        metrics = llm.metrics()
        assert not soak.count_objects() - before
    assert (metrics.num_running, metrics.num_waiting, metrics.num_used_blocks) == (0, 0, 0)
    assert metrics.num_finished >= 1500
    assert soak.slope(readings) < BYTES_PER_REQUEST
