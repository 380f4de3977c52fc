"""How many JSON schemas of the world are taken, and whether what is taken lets wrong answers through.

    python -m bench.schema_suite FOLDER [--sets Github_easy Github_medium] [--number 200] [--seed 0] [--model demo]

FOLDER holds JSON files in either form of the repository guidance-ai/jsonschemabench. One is `data`, a folder of schemas
for each set. The other is `maskbench/data`, files SET---NAME.json with a "schema" and "tests", which are instances and
whether they are valid. `number` files of each set are drawn.

A schema is taken where its constraint compiles. An instance is let through where a model could write it, token by
token, as `json.dumps` does. Instances that are valid by the schema may be refused, such as one with properties that the
schema does not list. An invalid one that is let through is a fault, unless the schema is relaxed.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinilm import LLM, Constraint, InfinilmError
from infinilm.scheduling.matcher import Matcher, allowed_tokens


@dataclass
class Count:
    """What a set comes to."""

    num_schemas: int = 0
    num_taken: int = 0
    num_relaxed: int = 0  # more schemas that are taken without being strict
    valid: list[bool] = field(default_factory=list)  # whether each valid instance is let through
    invalid: list[bool] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # invalid instances that are let through


def files_by_set(folder: Path) -> dict[str, list[Path]]:
    """The files of each set, in the order of their names."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.json")):
        name = path.name.partition("---")[0] if "---" in path.name else path.parent.name
        found.setdefault(name, []).append(path)
    return found


def read_case(path: Path) -> tuple[Any, Sequence[Mapping[str, Any]]]:
    """A schema, and its instances with whether they are valid."""
    value = json.loads(path.read_text(encoding="utf-8"))
    return (value["schema"], value["tests"]) if "tests" in value and "schema" in value else (value, ())


def lets_through(llm: LLM, matcher: Matcher, instance: object) -> bool:
    """Whether a model may write an instance, and then end; False, too, where the grammar costs too much on the way."""
    ids = llm.tokenizer.encode(json.dumps(instance, ensure_ascii=False), add_special_tokens=False)
    try:
        for token_id in [*ids, min(llm.tokenizer.eos_token_ids)]:
            if not allowed_tokens(matcher, llm.tokenizer.vocab_size)[token_id]:
                return False
            matcher.advance(token_id)
    except InfinilmError:
        return False
    return True


def compiled(llm: LLM, schema: Any, *, strict: bool) -> Constraint | None:
    """The constraint of a schema; None: it is refused."""
    try:
        constraint = Constraint.json_schema(schema, strict=strict)
        llm.grammars.matcher(constraint)
    except InfinilmError:
        return None
    return constraint


def measure(llm: LLM, paths: Sequence[Path]) -> Count:
    count = Count()
    for path in paths:
        schema, instances = read_case(path)
        count.num_schemas += 1
        constraint = compiled(llm, schema, strict=True)
        if constraint is None:
            count.num_relaxed += compiled(llm, schema, strict=False) is not None
            continue
        count.num_taken += 1
        for instance in instances:
            passes = lets_through(llm, llm.grammars.matcher(constraint), instance["data"])
            (count.valid if instance["valid"] else count.invalid).append(passes)
            if passes and not instance["valid"]:
                count.faults.append(f"{path.name}: {json.dumps(instance['data'])[:200]}")
    return count


def report(counts: Mapping[str, Count]) -> Iterator[str]:
    """Lines of a table, and the faults behind it."""
    yield "| set | schemas | taken | relaxed, too | valid instances let through | invalid ones let through |"
    yield "|---|---|---|---|---|---|"
    for name, count in counts.items():
        relaxed = (count.num_taken + count.num_relaxed) / count.num_schemas
        yield (
            f"| {name} | {count.num_schemas} | {count.num_taken / count.num_schemas:.3f} | {relaxed:.3f} | "
            f"{sum(count.valid)} of {len(count.valid)} | {sum(count.invalid)} of {len(count.invalid)} |"
        )
    for count in counts.values():
        yield from count.faults


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", nargs="+", help="default: all")
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args(arguments)
    found = files_by_set(args.folder)
    if absent := [name for name in args.sets or () if name not in found]:
        parser.error(f"{args.folder} has no set {absent[0]!r}; there are {', '.join(found) or 'none'}")
    counts: dict[str, Count] = {}
    with LLM(args.model, max_num_seqs=1, kv_cache="64MiB", use_tqdm=False) as llm:
        for name in args.sets or found:
            drawn = random.Random(args.seed).sample(found[name], min(args.number, len(found[name])))
            counts[name] = measure(llm, sorted(drawn))
    print("\n".join(report(counts)))


if __name__ == "__main__":
    logging.getLogger("infinilm").setLevel(logging.ERROR)  # not what each relaxed schema leaves out
    main()
