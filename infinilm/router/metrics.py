"""Prometheus metrics of the router, and those of all its replicas in one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import aiohttp
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from infinilm.router.replicas import Pool, Replica
from infinilm.server.metrics import HttpCounter

__all__ = ["RouterMetrics"]


class RouterMetrics:
    """What the router has done."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._answers = self._counter("requests", "Answers of replicas.", ["replica", "status"])
        self.retried = self._counter("retries", "Requests given to another replica before anything was sent.")
        self.resumed = self._counter("resumed_streams", "Streams that another replica went on with.")
        self._queries = self._counter("prefix_queries", "Blocks of prompts looked for among those that replicas have.")
        self._hits = self._counter("prefix_hits", "Blocks of them that the chosen replica has.")
        self.http = HttpCounter("infinilm_router:")
        self._registry.register(self.http)

    def _counter(self, name: str, about: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(f"infinilm_router:{name}", about, list(labels), registry=self._registry)

    def answered(self, replica: Replica, status: int) -> None:
        """Count an answer."""
        self._answers.labels(str(replica.index), str(status)).inc()

    def chosen(self, num_blocks: int, num_matched: int) -> None:
        """Count the blocks of a prompt, and those that the replica chosen for it has."""
        self._queries.inc(num_blocks)
        self._hits.inc(num_matched)

    async def render(self, pool: Pool, session: aiohttp.ClientSession, seconds: float) -> bytes:
        """The text format: of the router, and of every replica that answers in so many seconds, with its index."""
        limit = aiohttp.ClientTimeout(total=seconds)

        async def fetch(replica: Replica) -> tuple[int, str]:
            try:
                async with session.get(f"{replica.url}/metrics", headers=replica.headers, timeout=limit) as answer:
                    return replica.index, await answer.text() if answer.status == 200 else ""
            except (aiohttp.ClientError, OSError, ValueError, asyncio.TimeoutError):
                return replica.index, ""

        texts = await asyncio.gather(*map(fetch, pool.up))
        registry = CollectorRegistry()
        registry.register(_Now(pool, texts))
        return generate_latest(self._registry) + generate_latest(registry)


class _Now(Collector):
    """The state of the replicas, and what they say."""

    def __init__(self, pool: Pool, texts: list[tuple[int, str]]) -> None:
        self._pool, self._texts = pool, texts

    def collect(self) -> Iterator[Metric]:
        """Each metric once, with the samples of all replicas."""
        is_up = GaugeMetricFamily("infinilm_router:replica_up", "Whether it can be used.", labels=["replica"])
        running = GaugeMetricFamily(
            "infinilm_router:replica_requests_running", "Requests that were sent there and run.", labels=["replica"]
        )
        for replica in self._pool.replicas:
            is_up.add_metric([str(replica.index)], float(replica.state == "up"))
            running.add_metric([str(replica.index)], replica.num_running)
        yield from (is_up, running)
        families: dict[str, Metric] = {}
        for index, text in self._texts:
            for family in text_string_to_metric_families(text):
                found = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type, family.unit)
                )
                for sample in family.samples:
                    labels = {"replica": str(index), **sample.labels}
                    found.samples.append(Sample(sample.name, labels, sample.value, sample.timestamp, sample.exemplar))
        yield from families.values()
