"""Compare answers with adversarial drafts with those without, bit for bit: ids, log-probabilities, reasons of the end.

    python tools/fuzz_drafts.py [--tokens 1000000] [--seed 0] [-k TEXT]...

Every family and format of `tests/speculation/mixtures.py` has an equal share of the tokens, and requests of all kinds
run together in it: greedy, at a temperature, by a JSON schema, with penalties, with an adapter. Drafts are right,
wrong, right and then wrong, random, or not even tokens, of any lengths. It prints a line for each, the first request
that differs, and fails if there is one. `-k`: only names that have this text, such as `qwen3-moe-int4`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from speculation.mixtures import FAMILIES, FORMATS, KINDS, WITH_STATES, Mixture, Tally  # noqa: E402

REQUESTS = 60
ALL_FAMILIES = FAMILIES + WITH_STATES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-k", action="append", default=[], metavar="TEXT")
    args = parser.parse_args()
    chosen = [
        (family, form)
        for family, form in itertools.product(ALL_FAMILIES, FORMATS)
        if all(text in f"{family}-{form}" for text in args.k)
    ]
    if not chosen:
        raise SystemExit(f"nothing is named so; families: {', '.join(ALL_FAMILIES)}, formats: {', '.join(FORMATS)}")
    total, started = Tally(), time.monotonic()
    for family, form in chosen:
        tally, seed = Tally(), args.seed
        with tempfile.TemporaryDirectory() as folder, Mixture(Path(folder), family, form) as mixture:
            while sum(tally.num_tokens.values()) < args.tokens / len(chosen):
                for request, expected, got in mixture.compare(seed, REQUESTS, tally)[:1]:
                    print(f"differs, seed {seed}: {request}\n  without drafts {expected}\n  with drafts {got}")
                seed += 1
        for kind in KINDS:
            total.num_tokens[kind] += tally.num_tokens[kind]
        total.num_different += tally.num_different
        total.num_drafted += tally.num_drafted
        total.num_accepted += tally.num_accepted
        print(f"{family}-{form}: {summary(tally)}", flush=True)
    print(f"all: {summary(total)}; {time.monotonic() - started:.0f} s")
    raise SystemExit(total.num_different > 0)


def summary(tally: Tally) -> str:
    kinds = ", ".join(f"{kind} {count}" for kind, count in tally.num_tokens.items())
    return (
        f"{sum(tally.num_tokens.values())} tokens ({kinds}); drafted {tally.num_drafted}, right {tally.num_accepted}; "
        f"{tally.num_different} requests differ"
    )


if __name__ == "__main__":
    main()
