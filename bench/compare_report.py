"""What compare.py prints: Markdown, a table for each class of weights, and one of goals."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.compare import ClassResult, Round, Section

OURS = "infinilm"
FILES = "files"
WITHIN = (OURS, FILES)  # infinilm alone, each to its bf16
BEST = "the best of them"


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median, and the quartiles if there are several."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:,.{digits}f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:,.{digits}f} ({low:,.{digits}f} .. {high:,.{digits}f})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def first_of(weights: str) -> str:
    """The label that the others of a class are compared with."""
    return "infinilm bf16" if weights in WITHIN else f"infinilm {weights}"


def rates(rounds: Iterable[Round], label: str) -> list[float]:
    return [r.tokens_per_second[label] for r in rounds if label in r.tokens_per_second]


def ratios(rounds: Iterable[Round], over: str, under: Sequence[str]) -> list[float]:
    """Within each round that has both: of `over` to the fastest of `under`."""
    found = []
    for r in rounds:
        speeds = [r.tokens_per_second[label] for label in under if label in r.tokens_per_second]
        if speeds and over in r.tokens_per_second:
            found.append(r.tokens_per_second[over] / max(speeds))
    return found


def alone(section: Section, sections: Sequence[Section]) -> str:
    """The name of the same work without a neighbour; "" if it is not there."""
    same = replace(section, neighbour=False)
    return next((s.name for s in sections if replace(s, name=section.name) == same), "")


def kept(result: ClassResult, section: Section, sections: Sequence[Section], label: str) -> list[float]:
    """The share of its speed alone that an engine keeps beside a neighbour."""
    pairs = zip(result.rounds[section.name], result.rounds[alone(section, sections)], strict=True)
    both = [(beside.tokens_per_second, calm.tokens_per_second) for beside, calm in pairs]
    return [beside[label] / calm[label] for beside, calm in both if label in beside and label in calm]


def limit_shares(result: ClassResult, section: Section, config: Mapping[str, Any], label: str) -> list[float]:
    """The share of the limit in each round.

    The limit of a prefill is the peak of float32 FMA, or of bfloat16 where infinilm computes in it. That of a decode of
    one sequence is the read bandwidth, by the bytes of the weights alone, so the cost of the cache shows. There is no
    limit for other sections.
    """
    if section.requests or section.neighbour or (section.steps and section.batch > 1):
        return []

    def limit(r: Round) -> float:
        if section.steps:
            return r.read_bytes_per_second / result.weight_bytes[label]
        flops = r.bf16_flops_per_second if label == "infinilm bf16" else r.flops_per_second
        return flops / flops_per_token(config)

    used = [r for r in result.rounds[section.name] if label in r.tokens_per_second]
    return [r.tokens_per_second[label] / limit(r) for r in used]


def flops_per_token(config: Mapping[str, Any]) -> int:
    """Multiplications and additions of the linears of all layers; the one row of the output head is left out."""
    q, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    layer = config["hidden_size"] * (2 * q + 2 * kv + 3 * config["intermediate_size"])
    return 2 * int(config["num_hidden_layers"]) * layer


def kv_bytes_per_token(config: Mapping[str, Any]) -> int:
    """Bytes of a token in a cache of 16 bits."""
    return 2 * 2 * int(config["num_hidden_layers"]) * config["num_key_value_heads"] * config["head_dim"]


def percent(values: Sequence[float]) -> str:
    return spread([100 * value for value in values], 0) + " %" if values else ""


def report_class(
    weights: str,
    result: ClassResult,
    sections: Sequence[Section],
    config: Mapping[str, Any] | None,
    args: argparse.Namespace,
) -> list[str]:
    """One table: tokens/s, ratios, what is kept beside a neighbour, the limits and the shares of them.

    `config`: of a dense model, for the shares; None: there are none.
    """
    names, rounds = [section.name for section in sections], result.rounds
    labels = [label for label in result.versions if any(label in r.tokens_per_second for n in names for r in rounds[n])]
    rows: list[list[str]] = []

    def add(name: str, cell: Callable[[Section], str]) -> None:
        rows.append([name, *map(cell, sections)])

    for label in labels:
        add(f"{label}, tokens/s", lambda s, label=label: spread(rates(rounds[s.name], label)))
    first = first_of(weights)
    peers = [label for label in labels if label != first] if first in labels else []
    for label in peers:
        over, under = (label, first) if weights in WITHIN else (first, label)
        name = f"{over} : {under}" if weights in WITHIN else f"infinilm : {label}"
        add(name, lambda s, over=over, under=under: spread(ratios(rounds[s.name], over, [under]), 2))
    if weights not in WITHIN and len(peers) > 1:
        add(f"infinilm : {BEST}", lambda s: spread(ratios(rounds[s.name], first, peers), 2))
    if any(s.neighbour and alone(s, sections) for s in sections):
        for label in labels:
            add(
                f"{label}, of its speed alone",
                lambda s, label=label: percent(kept(result, s, sections, label)) if s.neighbour else "",
            )
    if not args.cpu_time:
        giga = 1e9
        add("read bandwidth, GB/s", lambda s: spread([r.read_bytes_per_second / giga for r in rounds[s.name]]))
        add("float32 FMA, Gflop/s", lambda s: spread([r.flops_per_second / giga for r in rounds[s.name]], 0))
        if "infinilm bf16" in labels:
            add("bfloat16, Gflop/s", lambda s: spread([r.bf16_flops_per_second / giga for r in rounds[s.name]], 0))
        if config is not None:
            for label in labels:
                add(
                    f"{label}, of its limit",
                    lambda s, label=label, config=config: percent(limit_shares(result, s, config, label)),
                )
    lines = [f"**{weights}**", "", *table(["", *names], rows), ""]
    lines += [f"{label} is not in the table: {why}." for label, why in result.failures.items()]
    all_rounds = [r for n in names for r in rounds[n]]
    disturbed = [r.others for r in all_rounds if r.others > args.max_others]
    used = spread([r.others for r in all_rounds], 2)
    lines.append(f"Rounds: {len(rounds[names[0]])}. Cores that other processes used at most in a piece: {used}.")
    if disturbed:
        lines.append(
            f"{len(disturbed)} of {len(all_rounds)} pieces were disturbed in every one of {args.tries} tries: by more "
            f"than {args.max_others:g} cores, {max(disturbed):.2f} at most."
        )
    return [*lines, ""]


# ---- goals ----


@dataclass(frozen=True)
class Goal:
    weights: str
    section: str
    least: float
    against: str = BEST  # or one peer, or "limit", or "kept": of what llama.cpp keeps beside a neighbour


GOALS = [
    Goal("bf16", "prefill 512", 0.8, "limit"),
    Goal("bf16", "decode b1", 0.97, "limit"),
    Goal("bf16", "b8", 1.2),
    Goal("bf16", "b32", 1.2),
    Goal("int8", "prefill 512", 1.25),
    Goal("int8", "decode b1", 1.05),
    Goal("int4", "prefill 512", 1.1),
    Goal("int4", "decode b1", 1.1),
    Goal("int4", "b8", 1.2),
    Goal("int4", "32 requests", 1.5, "llama.cpp"),
    *(
        Goal(weights, section, 1.0, "kept")
        for weights in ("bf16", "int8", "int4")
        for section in ("b1 beside a neighbour", "b8 beside a neighbour")
    ),
]
AFTER, BEFORE = "b1 after 2048", "decode b1"


def report_goals(
    results: Mapping[str, ClassResult], sections: Sequence[Section], config: Mapping[str, Any]
) -> list[str]:
    """Which of them are met, of those that were measured."""
    by_name = {section.name: section for section in sections}
    rows = []

    def add(name: str, least: float, values: Sequence[float]) -> None:
        if values:
            met = "yes" if statistics.median(values) >= least else "no"
            rows.append([name, f"{least:g}", spread(values, 2), met])

    for goal in GOALS:
        section = by_name.get(goal.section)
        if goal.weights not in results or section is None:
            continue
        result, us = results[goal.weights], first_of(goal.weights)
        peers = [label for label in result.versions if label != us]
        llama = [label for label in peers if label.startswith("llama.cpp")]
        what = f"{goal.weights}, {goal.section}"
        if goal.against == "limit":
            add(f"{what}: share of its limit", goal.least, limit_shares(result, section, config, us))
        elif goal.against == "kept":
            if llama and alone(section, sections):
                pairs = zip(
                    kept(result, section, sections, us), kept(result, section, sections, llama[0]), strict=False
                )
                add(f"{what}: kept, to what {llama[0]} keeps", goal.least, [a / b for a, b in pairs])
        else:
            others = peers if goal.against == BEST else llama
            name = "the best peer" if goal.against == BEST else llama[0] if llama else ""
            add(f"{what}: infinilm : {name}", goal.least, ratios(result.rounds[goal.section], us, others))
    if {AFTER, BEFORE} <= by_name.keys():  # tokens/s that the bytes of the KV cache at 80% of the bandwidth would leave
        for weights, result in results.items():
            us = first_of(weights)
            if weights in WITHIN or us not in result.weight_bytes:
                continue
            more = (by_name[AFTER].context - by_name[BEFORE].context) * kv_bytes_per_token(config) / 0.8
            left = result.weight_bytes[us] / (result.weight_bytes[us] + more)
            both = zip(rates(result.rounds[AFTER], us), rates(result.rounds[BEFORE], us), strict=False)
            add(f"{weights}, {AFTER}: speed, to what KV bytes at 80 % leave", 1.0, [a / b / left for a, b in both])
    return table(["goal", "at least", "measured", "met"], rows) if rows else []
