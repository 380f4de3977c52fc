"""Simulates the router's choice: `python -m bench.route_sim --replicas 64 --conversations 1000000`.

The choice and the memory of prefixes are the router's own code; what is simulated are conversations and replicas. A
conversation begins with one of some system prompts, has a geometric number of turns with times to think between them,
and each turn sends all that was said. A replica computes what its cache has not of one prompt after another, then gives
tokens at a constant pace; its cache has all it computed, and forgets what is longest unused. Printed for each policy:
the share of prompt tokens found in caches, times to first token, how much the busiest replica has to compute above the
mean, and the CPU time of a choice. Blocks are larger here than the router's, which saves time and changes little.
"""

from __future__ import annotations

import argparse
import heapq
import random
import time
from dataclasses import dataclass

from infinilm.router import replicas as replicas_module
from infinilm.router.prefixes import BLOCK_TOKENS, PrefixIndex, PrefixTable
from infinilm.router.replicas import Replica, choose

PREFILL = 20_000.0  # tokens a second of a replica
PACE = 0.03  # seconds a token
THINK = 30.0  # seconds between turns, mean
TURNS = 5.0  # of a conversation, mean
MESSAGE, ANSWER = 100, 250  # tokens, mean
SYSTEM, NUM_SYSTEMS = 1000, 16  # tokens of a system prompt, and how many there are
CACHE = 500_000  # tokens of a replica
BLOCK = 128  # tokens


@dataclass(slots=True)
class Conversation:
    """What has been said, in blocks, and how many turns are left."""

    number: int
    chain: list[int]
    tokens: int
    turns: int

    def say(self, tokens: int) -> None:
        """Add tokens; blocks that are full get hashes of their own."""
        self.tokens += tokens
        for i in range(len(self.chain), self.tokens // BLOCK):
            self.chain.append(hash((self.number, i)))


class Machine:
    """A replica: what it has computed, and until when it is busy with prompts."""

    def __init__(self, index: int, table: PrefixTable) -> None:
        self.replica = Replica(f"http://replica{index}", None)
        self.replica.prefixes = PrefixIndex(CACHE // BLOCK, table)
        self.cache = PrefixIndex(CACHE // BLOCK)
        self.free_at = self.busy = 0.0


@dataclass(slots=True)
class Result:
    """The outcome of one policy."""

    hit_rate: float
    ttft: list[float]  # sorted
    busiest: float  # times the mean
    choice: float  # seconds of CPU


def simulate(policy: str, num_replicas: int, conversations: int, rate: float, imbalance: int, seed: int = 1) -> Result:
    """Run all conversations; `rate`: requests a second of each replica."""
    draw = random.Random(seed)
    table = PrefixTable()
    machines = [Machine(i, table) for i in range(num_replicas)]
    replicas = [machine.replica for machine in machines]
    of = {id(machine.replica): machine for machine in machines}
    systems = [[hash((-1 - s, i)) for i in range(SYSTEM // BLOCK)] for s in range(NUM_SYSTEMS)]
    arrivals = rate * num_replicas / TURNS
    events: list[tuple[float, int, Conversation | None, Replica | None]] = [(0.0, 0, None, None)]
    count = order = 0
    queried = hit = 0
    ttft: list[float] = []
    spent = 0.0
    turn = 0
    while events:
        now, _, talk, done_by = heapq.heappop(events)
        order += 1
        if done_by is not None and talk is not None:  # an answer is complete
            done_by.num_running -= 1
            talk.say(max(1, int(draw.expovariate(1 / ANSWER))))
            of[id(done_by)].cache.remember(talk.chain)
            talk.turns -= 1
            if talk.turns > 0:
                heapq.heappush(events, (now + draw.expovariate(1 / THINK), order, talk, None))
            continue
        if talk is None:  # a new conversation
            count += 1
            if count < conversations:
                heapq.heappush(events, (now + draw.expovariate(arrivals), order, None, None))
            turns = 1
            while draw.random() < 1 - 1 / TURNS:
                turns += 1
            talk = Conversation(count, list(systems[draw.randrange(NUM_SYSTEMS)]), SYSTEM, turns)
        talk.say(max(1, int(draw.expovariate(1 / MESSAGE))))
        begin = time.process_time()
        if policy == "round-robin":
            turn += 1
            replica = replicas[turn % num_replicas]
        else:
            found, _ = choose(replicas, talk.chain if policy == "prefix" else [], imbalance)
            assert found is not None
            replica = found
            replica.prefixes.remember(talk.chain if policy == "prefix" else [])
        spent += time.process_time() - begin
        replica.num_running += 1
        replica.num_sent += 1
        machine = of[id(replica)]
        cached = machine.cache.match(talk.chain) * BLOCK
        machine.cache.remember(talk.chain)
        queried += talk.tokens
        hit += cached
        work = (talk.tokens - cached) / PREFILL
        machine.free_at = max(machine.free_at, now) + work
        machine.busy += work
        ttft.append(machine.free_at - now)
        end = machine.free_at + PACE * ANSWER
        heapq.heappush(events, (end, order, talk, replica))
    busy = [machine.busy for machine in machines]
    return Result(hit / queried, sorted(ttft), max(busy) * num_replicas / sum(busy), spent / len(ttft))


def main() -> None:
    """Print a line for each policy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--conversations", type=int, default=20_000, help="of all replicas together")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second of each replica")
    parser.add_argument("--imbalance", type=int, nargs="+", default=[8])
    parser.add_argument("--policy", nargs="+", default=["round-robin", "least-loaded", "prefix"])
    args = parser.parse_args()
    replicas_module.BLOCKS_OF_A_REQUEST = replicas_module.BLOCKS_OF_A_REQUEST * BLOCK_TOKENS // BLOCK
    print("replicas policy        k   hits  TTFT mean   p50    p99 ms  busiest  us/choice")
    for num_replicas in args.replicas:
        for policy in args.policy:
            for imbalance in args.imbalance if policy == "prefix" else [0]:
                found = simulate(policy, num_replicas, args.conversations, args.rate, imbalance)
                times, many = found.ttft, len(found.ttft)
                mean, p50, p99 = sum(times) / many, times[many // 2], times[many * 99 // 100]
                print(
                    f"{num_replicas:8} {policy:12} {imbalance:3}  {found.hit_rate:.3f}  {mean * 1e3:9.1f} "
                    f"{p50 * 1e3:6.1f} {p99 * 1e3:7.1f}  {found.busiest:7.2f}  {found.choice * 1e6:9.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
