"""What predictions and forced tokens save: steps and time of the bundled model, with drafts and without.

    python -m bench.drafts_bench [--rounds 8]

Each kind of request is answered without drafts and with those of one source, in turns. The answers are compared, too.
The bundled model is small, so that drafting and masks take a large part of its steps: the ratio of steps is what larger
models come near to.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from infinilm import LLM, Constraint
from infinilm.speculation.grammar import follow_grammar

NAMES = ("customer_name", "shipping_address", "order_status", "preferred_colour", "delivery_instructions")
FORM = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 12} for name in NAMES},
    "required": list(NAMES),
    "additionalProperties": False,
}
PROMPT = "Once upon a time"
PLAIN: dict[str, Any] = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}


def requests(llm: LLM) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By kind, the keywords of a request without drafts, and of the same one with them."""
    form = {"temperature": 0, "max_tokens": 400, "constraint": Constraint.json_schema(FORM)}
    answer = list(llm.generate(PROMPT, use_tqdm=False, **PLAIN)[0].outputs[0].token_ids)
    edited = answer.copy()
    for place in range(20, len(edited), 40):  # an edit every 40 tokens
        edited[place : place + 2] = [5, 6, 7]
    return {
        "a schema of many keys": (form, form),
        "the answer as its prediction": (PLAIN, {**PLAIN, "prediction": answer}),
        "a prediction with an edit every 40 tokens": (PLAIN, {**PLAIN, "prediction": edited}),
    }


def main() -> None:
    """Print a line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    with LLM("demo", use_tqdm=False) as plain, LLM("demo", use_tqdm=False, speculation=follow_grammar) as drafting:

        def run(llm: LLM, sampling: dict[str, Any]) -> tuple[float, int, list[int]]:
            steps, started = llm.metrics().num_steps, time.perf_counter()
            (output,) = llm.generate(PROMPT, use_tqdm=False, **sampling)
            seconds = time.perf_counter() - started
            return seconds, llm.metrics().num_steps - steps, list(output.outputs[0].token_ids)

        for kind, (without, with_drafts) in requests(plain).items():
            ratios, num_steps = [], (0, 0)
            for _ in range(args.rounds):
                seconds, steps, ids = run(plain, without)
                seconds_drafting, steps_drafting, ids_drafting = run(drafting, with_drafts)
                assert ids == ids_drafting, "drafts have changed an answer"
                ratios.append(seconds / seconds_drafting)
                num_steps = steps, steps_drafting
            print(
                f"{kind}: {len(ids)} tokens in {num_steps[1]} steps in place of {num_steps[0]}, "
                f"{num_steps[0] / num_steps[1]:.1f} x fewer; {statistics.median(ratios):.2f} x faster"
            )


if __name__ == "__main__":
    main()
