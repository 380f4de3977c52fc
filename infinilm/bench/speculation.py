"""What drafts gain: one answer with drafts and without, by turns.

The prompt is code followed by the request for the same code with a name changed, which a model answers by repeating
most of it; a model without a tokenizer gets random tokens. The answer is that of the model, so the gain is what such a
request gains with this model, and not a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from infinilm.bench.limits import Spread

if TYPE_CHECKING:
    from infinilm.llm import LLM

__all__ = ["SpeculationResult", "format_speculation", "measure_speculation"]

_CODE = '''def read_table(path):
    """Read a table of numbers, one row a line, and return it with the sum of each column."""
    rows = []
    with open(path) as file:
        for line in file:
            if line.strip():
                rows.append([float(item) for item in line.split(",")])
    sums = [sum(column) for column in zip(*rows)]
    return rows, sums
'''
_PROMPT = f"```python\n{_CODE}```\n\nThe same function with `rows` called `table`:\n\n```python\n"
_NUM_RANDOM = 128  # tokens of a prompt without a tokenizer


@dataclass(frozen=True, slots=True)
class SpeculationResult:
    """What `measure_speculation` found.

    Attributes
    ----------
    num_prompt_tokens, num_tokens : int
    plain_tokens_per_second, tokens_per_second : Spread
        Without drafts and with them, from the first token on.
    speed_up : Spread
        The ratio of the two, round by round.
    tokens_per_step : float
        With drafts.
    num_draft_tokens, num_accepted_tokens : int
        Counts of all rounds.
    accepted_at : tuple of float
        At each place of a draft, how many of all drafts were right up to there, 0 to 1.
    """

    num_prompt_tokens: int
    num_tokens: int
    plain_tokens_per_second: Spread
    tokens_per_second: Spread
    speed_up: Spread
    tokens_per_step: float
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_at: tuple[float, ...]


def measure_speculation(llm: LLM, num_tokens: int, repeats: int) -> SpeculationResult:
    """Answer the prompt `repeats` times without drafts and with them, by turns, after a first round to warm up.

    Parameters
    ----------
    llm : LLM
        Made with ``speculation="auto"``; a prompt that its context does not hold is cut.
    num_tokens : int
        Tokens of an answer, >= 2.
    repeats : int
        >= 1.
    """
    ids = np.random.default_rng(0).integers(0, llm.config.vocab_size, _NUM_RANDOM).tolist()
    if llm.tokenizer:
        ids = llm.tokenizer.encode(_PROMPT)
    ids = ids[-max(1, llm.max_model_len - num_tokens) :]

    def seconds(speculation: str) -> float:
        (output,) = llm.generate(
            [ids],
            temperature=0,
            max_tokens=num_tokens,
            ignore_eos=True,
            speculation=speculation,
            use_tqdm=False,
        )
        assert output.metrics is not None
        times = output.metrics.token_times
        return times[-1] - times[0]

    for speculation in ("off", "auto"):
        seconds(speculation)
    before, num_steps = llm.metrics(), 0
    plain: list[float] = []
    drafted: list[float] = []
    for _ in range(repeats):
        plain.append(seconds("off"))
        begun = llm.metrics().num_steps
        drafted.append(seconds("auto"))
        num_steps += llm.metrics().num_steps - begun - 1  # the first computes the end of the prompt
    after = llm.metrics()
    num_drafts = max(after.num_drafts - before.num_drafts, 1)
    earlier = before.accepted_at or (0,) * len(after.accepted_at)
    return SpeculationResult(
        num_prompt_tokens=len(ids),
        num_tokens=num_tokens,
        plain_tokens_per_second=Spread.of([(num_tokens - 1) / time for time in plain]),
        tokens_per_second=Spread.of([(num_tokens - 1) / time for time in drafted]),
        speed_up=Spread.of([a / b for a, b in zip(plain, drafted, strict=True)]),
        tokens_per_step=repeats * (num_tokens - 1) / max(num_steps, 1),
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
        accepted_at=tuple((b - a) / num_drafts for a, b in zip(earlier, after.accepted_at, strict=True)),
    )


def format_speculation(result: SpeculationResult) -> str:
    """Write a result for people."""
    places = " ".join(f"{share:.2f}" for share in result.accepted_at)
    plain, drafted, gain = result.plain_tokens_per_second, result.tokens_per_second, result.speed_up
    return "\n".join(
        [
            f"drafts in an answer of {result.num_tokens} tokens to a prompt of {result.num_prompt_tokens}",
            f"  tokens/s      {drafted.median:9.1f} ({drafted.min:.1f} .. {drafted.max:.1f})",
            f"  without       {plain.median:9.1f} ({plain.min:.1f} .. {plain.max:.1f})",
            f"  speed-up      {gain.median:9.2f} ({gain.min:.2f} .. {gain.max:.2f})",
            f"  tokens a step {result.tokens_per_step:9.2f}",
            f"  drafted       {result.num_draft_tokens:9} tokens, of which {result.num_accepted_tokens} were right",
            f"  right up to   {places}",
        ]
    )
