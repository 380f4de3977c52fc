"""A Ray cluster of two nodes, which are raylets of this machine: servers and stages find both, and one may be lost."""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from server.support import KEY, SECONDS, ServerProcess, started, wait_for

from router.support import CLIENT_KEY
from router.test_failures import HEADERS, REQUESTS, TEXT, ask, said
from router.test_replicas import replicas_of, several

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")

# Each node has room for one server of one thread.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
node = cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
for line in sys.stdin:
    if line == "lose\\n":
        cluster.remove_node(node, allow_graceful=False)
    else:
        node = cluster.add_node(num_cpus=1)
    print("done", flush=True)
cluster.shutdown()
"""


class TwoNodes:
    """A cluster, in a process that has nothing else of Ray; none of its answers is waited for longer than `SECONDS`."""

    def __init__(self, folder: Path, program: str = CLUSTER, seconds: float = SECONDS) -> None:
        self._errors, self._seconds = folder / "stderr", seconds
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.address = self._line()
        except BaseException:
            self.stop()
            raise

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")  # the end

    def _line(self) -> str:
        try:
            line = self._lines.get(timeout=self._seconds)
        except queue.Empty:
            pytest.fail(f"the cluster said nothing in {self._seconds} seconds: {self._errors.read_text()}")
        assert line, f"the cluster has ended: {self._errors.read_text()}"
        return line.strip()

    def order(self, what: str) -> None:
        """Lose the second node, or add another one."""
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        assert self._line() == "done"

    def stop(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.close()  # then it ends
        try:
            self._process.wait(self._seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # What it started may have its output still, and a read that waits keeps others from closing that.
        self._reader.join(self._seconds)
        if not self._reader.is_alive() and self._process.stdout is not None:
            self._process.stdout.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    nodes = TwoNodes(tmp_path_factory.mktemp("nodes"))
    yield nodes
    nodes.stop()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "import sys; sys.stderr.write('no room'); sys.stderr.flush(); import time; time.sleep(600)",
            "nothing in .*no room",
        ),
        ("import sys; sys.exit('no room')", "the cluster has ended: no room"),
    ],
)
def test_a_cluster_that_does_not_start_is_reported(tmp_path: Path, program: str, message: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception), match=message):
        TwoNodes(tmp_path, program, seconds=2)


def test_stages_on_both_nodes(cluster: TwoNodes, tmp_path: Path, replicas: list[ServerProcess]) -> None:
    command = ["serve", "demo", "--port", "0", "--api-key", CLIENT_KEY, "--device", "cpu", "--num-threads", "1"]
    command += ["--pipeline-parallel-size", "3", "--ray-address", cluster.address]
    with started("-m", "infinilm", *command, folder=tmp_path) as server, ThreadPoolExecutor(6) as pool:
        requests = [*REQUESTS[:3], *REQUESTS[4:7]]
        answers = [pool.submit(ask, server.url, *request, CLIENT_KEY) for request in requests]
        for request, answer in zip(requests, answers, strict=True):
            assert said(answer.result(SECONDS)) == said(ask(replicas[0].url, *request, KEY))
        assert server.stop() == 0, server.lines


def test_a_node_is_lost_and_another_comes(cluster: TwoNodes, tmp_path: Path, replicas: list[ServerProcess]) -> None:
    """Streams that ran there go on at the other one and say what they would have said; no client notices."""
    bodies = [{**TEXT, "seed": seed, "max_tokens": 300} for seed in range(4)]
    alone = [said(ask(replicas[0].url, "/v1/completions", body, KEY)) for body in bodies]
    arguments = ("--ray-address", cluster.address, "--num-threads", "1", "--routing", "round-robin")
    with several(*arguments, folder=tmp_path) as router, ThreadPoolExecutor(8) as pool:
        wait_for(lambda: len(replicas_of(router)) == 2)
        ended = threading.Event()

        def keep_asking(i: int) -> int:
            count = 0
            while not ended.is_set():
                body, wanted = bodies[i % len(bodies)], alone[i % len(bodies)]
                assert said(ask(router.url, "/v1/completions", body, CLIENT_KEY)) == wanted
                count += 1
            return count

        asking = [pool.submit(keep_asking, i) for i in range(8)]
        try:
            wait_for(lambda: all(replica["num_running"] > 1 for replica in replicas_of(router).values()))
            cluster.order("lose")
            wait_for(lambda: len(replicas_of(router)) == 1)
            cluster.order("add")
            wait_for(lambda: len(replicas_of(router)) == 2)
        finally:
            ended.set()
        assert sum(one.result(SECONDS) for one in asking) >= 8
        metrics = httpx.get(f"{router.url}/metrics", headers=HEADERS, timeout=SECONDS).text
    counts = [
        line.split()[1] for line in metrics.splitlines() if line.startswith("infinilm_router:re") and "{" not in line
    ]
    assert sum(map(float, counts)) > 0  # streams that another replica went on with, or began anew
