"""Verify receipts of many answers, and of each a copy with one change: no true one may fail, no changed one may pass.

    python tools/fuzz_receipts.py [--answers 1000000] [--seed 0] [--seconds S]

The bundled model answers texts of its own at any temperature, with and without penalties and filters, in batches. Half
of the changes are of a token, a quarter of a log-probability by one unit in its last place, a quarter of a token of the
prompt. A prompt may be changed into one after which the same tokens come with the same log-probabilities only if the
change has no effect at all, which does not happen here. It prints what it has counted, and fails if anything was wrong.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np

from infinilm import LLM, SamplingParams
from infinilm.receipts import Receipt

BATCH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so many")
    args = parser.parse_args()
    rng, started = np.random.default_rng(args.seed), time.monotonic()
    num_verified = num_alarms = num_changed = num_missed = 0
    with LLM("demo", max_num_seqs=64, use_tqdm=False) as llm:
        while num_verified < args.answers and time.monotonic() - started < args.seconds:
            receipts = answers(llm, rng)
            forged = [with_change(receipt, rng, llm.config.vocab_size) for receipt in receipts]
            verdicts = llm.verify([*receipts, *forged], use_tqdm=False)
            wrong = [one for one in verdicts[: len(receipts)] if one.status != "equal"]
            passed = [one for one, verdict in zip(forged, verdicts[len(receipts) :], strict=True) if verdict]
            for what, several in (("a true receipt failed", wrong), ("a changed receipt passed", passed)):
                for one in several[:1]:
                    print(f"{what}: {one}")
            num_verified, num_alarms = num_verified + len(receipts), num_alarms + len(wrong)
            num_changed, num_missed = num_changed + len(forged), num_missed + len(passed)
    print(
        f"{num_verified} answers verified, {num_alarms} false alarms; {num_changed} changes planted, {num_missed} "
        f"missed; {time.monotonic() - started:.0f} s"
    )
    raise SystemExit(num_alarms + num_missed > 0)


def answers(llm: LLM, rng: np.random.Generator) -> list[Receipt]:
    """Receipts of a batch of short answers."""
    vocab_size = llm.config.vocab_size
    prompts = [rng.integers(3, vocab_size, rng.integers(1, 12)).tolist() for _ in range(BATCH)]
    params = [
        SamplingParams(
            max_tokens=int(rng.integers(1, 8)),
            temperature=float(rng.choice([0.0, 0.7, 1.0, 1.5])),
            top_p=float(rng.choice([1.0, 0.9])),
            top_k=int(rng.choice([-1, 20])),
            frequency_penalty=float(rng.choice([0.0, 0.5])),
            seed=int(rng.integers(1 << 40)),
            ignore_eos=True,
            return_receipt=True,
        )
        for _ in prompts
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    receipts = [one.outputs[0].receipt for one in outputs if one.outputs[0].receipt is not None]
    if len(receipts) < len(outputs):
        failed = next(one.outputs[0] for one in outputs if one.outputs[0].receipt is None)
        raise SystemExit(f"an answer has no receipt: {failed}, {failed.error}")
    return receipts


def with_change(receipt: Receipt, rng: np.random.Generator, vocab_size: int) -> Receipt:
    """The receipt with one token or number that is another."""
    kind, place = rng.integers(4), int(rng.integers(len(receipt.token_ids)))
    if kind == 0:
        logprobs = receipt.logprobs.copy()
        logprobs[place] = np.nextafter(logprobs[place], np.float32(-np.inf))
        return replace(receipt, logprobs=logprobs)
    if kind == 1:
        prompt = list(receipt.prompt_token_ids)
        at = int(rng.integers(len(prompt)))
        prompt[at] = prompt[at] ^ 1
        return replace(receipt, prompt_token_ids=tuple(prompt))
    ids = list(receipt.token_ids)
    ids[place] = int((ids[place] + rng.integers(1, vocab_size)) % vocab_size)
    return replace(receipt, token_ids=tuple(ids))


if __name__ == "__main__":
    main()
