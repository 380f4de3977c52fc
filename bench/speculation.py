"""How much faster drafts make answers: code edits, and ordinary prose by the number of sequences.

    python -m bench.speculation llama-1b                       # bf16
    python -m bench.speculation llama-1b --quantization int4 --edits 4 --prose 1,8,32 --tokens 48
    python -m bench.speculation qwen3-5-4b --head 0.75 --prose 1,32      # an MTP head, instead of lookup
    python -m bench.speculation qwen3-5-4b --head 0.75 --fixed --head-settings '{"vocab_size": 65536}'
    python -m bench.speculation --count                        # tokens a step of many edits, without an engine

The model has random weights, so the answers are given: whatever a row draws, it is said to have drawn the next token of
the text (`TaughtThread`). All else is as ever: the engine computes each row, drafted ones among them, drafters find
what they find, and drafts are right or wrong as they are.

- edits: changes of this repository's own Python files, taken from its history. The prompt is a changed place with 20
  lines around it, as it was; the answer is the same place as it became.
- prose: the documents of this repository without code, lists and tables; the prompt is the first half of a piece, the
  answer the second.

With `--head`, the MTP head of the model is computed, and each of the tokens that it drafts, three at most, is then
replaced: by the token of the text with the given probability, else by another one.

Each text is answered without drafts and with them by turns, and ratios are of the sums of times. `--one-thread` takes
the time of the processor instead of that of the wall, with one thread, where the machine is shared with others; the
engine chooses lengths by the same clock then.
Tokens are those of mistral-common's tekken, ids beyond the vocabulary folded into it.
"""

from __future__ import annotations

import argparse
import difflib
import json
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

import mistral_common
import numpy as np
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from bench import ROOT
from bench.requests import request_maker
from bench.synthetic import SHAPES
from infinilm import LLM, _core
from infinilm.config.spec import build_spec
from infinilm.engine.hooks import EngineHooks, ModelSites
from infinilm.requests.request import EngineRequest
from infinilm.scheduling.mtp import MtpHead
from infinilm.scheduling.scheduler import Scheduler
from infinilm.scheduling.sequence import Sequence
from infinilm.scheduling.steps import Step
from infinilm.serving.engine_thread import EngineThread
from infinilm.serving.request_progress import RequestProgress
from infinilm.serving.request_queue import RequestQueue
from infinilm.speculation.lookup import LookupDrafter
from infinilm.speculation.settings import read_speculation

_AROUND = 20  # lines of an edit before its first change and behind its last one


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the answer that is given to it."""

    prompt: list[int]
    answer: list[int]


def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def edits(tokenizer: Tekkenizer, count: int, longest: int, vocab_size: int) -> list[Text]:
    """Changes of Python files with answers of 100 to `longest` tokens, drawn from the history with a fixed seed."""
    commits = git("log", "--format=%h", "--diff-filter=M", "--no-merges", "--", "infinilm/*.py").split()
    random.Random(0).shuffle(commits)
    found: list[Text] = []
    for commit in commits:
        names = git("diff", "--name-only", "--diff-filter=M", f"{commit}~1", commit, "--", "infinilm/*.py").split()
        for name in names[:1]:
            old = git("show", f"{commit}~1:{name}").splitlines(keepends=True)
            new = git("show", f"{commit}:{name}").splitlines(keepends=True)
            changes = [c for c in difflib.SequenceMatcher(None, old, new, False).get_opcodes() if c[0] != "equal"]
            _, a, b, c, d = changes[0]
            before = "".join(old[max(a - _AROUND, 0) : b + _AROUND])
            after = "".join(new[max(c - _AROUND, 0) : d + _AROUND])
            request = f"```python\n{before}```\nChange this code.\n```python\n"
            text = Text(encode(tokenizer, request, vocab_size), encode(tokenizer, after, vocab_size))
            if 100 <= len(text.answer) <= longest:
                found.append(text)
        if len(found) >= count:
            break
    return found[:count]


def prose(tokenizer: Tekkenizer, count: int, num_tokens: int, vocab_size: int) -> list[Text]:
    """Pieces of 3 x `num_tokens` tokens, of which the last third is the answer."""
    texts: list[str] = []
    for path in sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]):
        if path.name == "api.md":
            continue
        plain = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
        texts += [line for line in plain.split("\n\n") if line[:1].isalpha()]
    ids = encode(tokenizer, "\n\n".join(texts), vocab_size)
    size = 3 * num_tokens
    pieces = [ids[i : i + size] for i in range(0, len(ids) - size, size)]
    if len(pieces) < count:
        raise SystemExit(f"there are {len(pieces)} pieces of {size} tokens, and {count} are needed: fewer --tokens")
    random.Random(0).shuffle(pieces)
    return [Text(piece[: 2 * num_tokens], piece[2 * num_tokens :]) for piece in pieces[:count]]


def tekken() -> Tekkenizer:
    return Tekkenizer.from_file(Path(mistral_common.__file__).parent / "data/tekken_240911.json")


def encode(tokenizer: Tekkenizer, text: str, vocab_size: int) -> list[int]:
    return [token_id % vocab_size for token_id in tokenizer.encode(text, bos=False, eos=False)]


class TaughtScheduler(Scheduler):
    """Takes the time of steps from a clock of its own."""

    clock: Callable[[], float]
    _observed_at = 0.0

    def observe(self, step: Step, num_tokens: int, seconds: float) -> None:
        now = self.clock()
        super().observe(step, num_tokens, now - self._observed_at)
        self._observed_at = now


class TaughtProgress(RequestProgress):
    """Says of each row that it has drawn the token which the text has there."""

    texts: ClassVar[dict[bytes, list[int]]] = {}  # by the bytes of the prompt: prompt and answer

    def _sampled_ids(self, step: Step, output: _core.StepOutput) -> tuple[Any, dict[EngineRequest, BaseException]]:
        assert output.ids is not None
        ids = output.ids.numpy().copy()
        for row, (sequence, position) in enumerate(zip(step.samples, step.positions.tolist(), strict=True)):
            text = self.texts[sequence.prompt_token_ids.tobytes()]
            ids[row] = text[min(position, len(text) - 1)]
        return ids, {}


class TaughtThread(EngineThread):
    progress_class = TaughtProgress


class GivenHead(MtpHead):
    """The MTP head of a model, of whose drafted tokens a given share is right.

    Parameters
    ----------
    engine : InferEngine
    acceptance : float
        The probability that a drafted token is that of the text, if those before it are.
    """

    def __init__(self, engine: Any, acceptance: float) -> None:
        super().__init__(engine, 3)
        self._acceptance, self._rng = acceptance, random.Random(0)

    def drafted(self, sequence: Sequence) -> list[int]:
        """Given tokens in place of those that the head has drafted."""
        text = TaughtProgress.texts[sequence.prompt_token_ids.tobytes()]
        following = text[sequence.num_tokens :][: len(super().drafted(sequence))]
        return [token if self._rng.random() < self._acceptance else (token + 1) % 2 for token in following]


class Teacher:
    """Runs requests on the engine of an `LLM`, with answers that are given.

    Parameters
    ----------
    llm : LLM
    clock : callable
        Seconds.
    acceptance : float or None
        The MTP head drafts, and so many of its tokens are right (`GivenHead`). None: what the default of `speculation`
        has drafts.
    is_adaptive : bool
        Lengths are chosen; otherwise all of each draft is verified.
    """

    def __init__(
        self, llm: LLM, clock: Callable[[], float], acceptance: float | None = None, *, is_adaptive: bool = True
    ) -> None:
        self._clock = clock
        self._maker = request_maker(llm, llm.engine)
        memory, settings = llm.memory, read_speculation("auto")
        scheduler = TaughtScheduler(
            memory.num_blocks,
            memory.block_size,
            max_num_seqs=memory.max_num_seqs,
            max_model_len=llm.max_model_len,
            max_num_batched_tokens=2048,
            sliding_window=memory.sliding_window,
            num_window_blocks=memory.num_window_blocks,
            num_states=memory.num_states,
            snapshot_interval=memory.snapshot_interval,
            drafters=settings.drafters if acceptance is None else (GivenHead(llm.engine, acceptance),),
            is_adaptive=is_adaptive,
            vocab_size=llm.config.vocab_size,
        )
        scheduler.clock = clock
        spec = build_spec(llm.config, dtype=llm.dtype, max_model_len=llm.max_model_len)
        hooks = EngineHooks(llm.engine, ModelSites(spec), 1)
        queue = RequestQueue(memory.max_num_seqs, None)
        self.thread = TaughtThread(llm.engine, scheduler, hooks, self._maker.adapters, queue)

    def run(self, texts: SequenceOf[Text], num_tokens: int, speculation: str) -> float:
        """Seconds in which all of these are answered with so many tokens."""
        settings = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "speculation": speculation}
        for text in texts:
            TaughtProgress.texts[np.array(text.prompt, np.int32).tobytes()] = text.prompt + text.answer
        requests = self._maker.make([text.prompt for text in texts], None, settings)
        ends: SimpleQueue[object] = SimpleQueue()
        for request in requests:
            request.listen(ends.put, ends_only=True)
        started = self._clock()
        self.thread.submit([part for request in requests for part in request.to_submit])
        for _ in requests:
            ends.get()
        elapsed = self._clock() - started
        for text, request in zip(texts, requests, strict=True):
            assert list(request.output().outputs[0].token_ids) == text.answer[:num_tokens]
        return elapsed

    def seconds(self, texts: SequenceOf[Text], speculation: str) -> float:
        """The numbers are those of all answers to these, at once; their prompts are in the prefix cache."""
        self.run(texts, 1, "off")
        return self.run(texts, min(len(text.answer) for text in texts), speculation)


def measure(plain: Teacher, drafting: Teacher, batches: Iterable[SequenceOf[Text]]) -> str:
    """What to say of the times of these batches, without drafts and with them; both teachers may be the same."""
    sums, steps = [0.0, 0.0], [0, 0]
    ratios = []
    before = drafting.thread.metrics()
    for number, batch in enumerate(batches):
        pair = [0.0, 0.0]
        for turn in (0, 1) if number % 2 else (1, 0):
            teacher = (plain, drafting)[turn]
            num_steps = teacher.thread.metrics().num_steps
            pair[turn] = teacher.seconds(batch, ("off", "auto")[turn])
            steps[turn] += teacher.thread.metrics().num_steps - num_steps
            sums[turn] += pair[turn]
        ratios.append(pair[0] / pair[1])
    after = drafting.thread.metrics()
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    return (
        f"{sums[0] / sums[1]:.2f}x  (median {float(np.median(ratios)):.2f}, {min(ratios):.2f} to {max(ratios):.2f})  "
        f"steps {steps[0]} to {steps[1]}  drafted {drafted}, right {accepted / max(drafted, 1):.0%}"
    )


def count_tokens_per_step(texts: SequenceOf[Text], length: int) -> float:
    """Tokens a step, of all answers together, where drafts have a fixed length."""
    num_steps = 0
    for text in texts:
        drafter, done = LookupDrafter(2, length), 0
        drafter.update(text.prompt)
        while done < len(text.answer):
            draft = drafter.draft(length)
            rest = text.answer[done : done + len(draft)]
            right = next((i for i, (a, b) in enumerate(zip(draft, rest, strict=False)) if a != b), len(rest))
            new = text.answer[done : done + right + 1]
            drafter.update(new)
            done, num_steps = done + len(new), num_steps + 1
    return sum(len(text.answer) for text in texts) / num_steps


def batched(texts: list[Text], size: int) -> Iterator[list[Text]]:
    for i in range(0, len(texts) - size + 1, size):
        yield texts[i : i + size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", default="llama-1b", choices=sorted(SHAPES))
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--edits", type=int, default=6)
    parser.add_argument("--longest", type=int, default=400, help="tokens of an edit")
    parser.add_argument("--prose", default="1,8,32", help="sequences at once")
    parser.add_argument("--rounds", type=int, default=3, help="of each number of sequences")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer in prose")
    parser.add_argument("--head", type=float, metavar="ACCEPTANCE", help="the MTP head drafts, right so often")
    parser.add_argument("--head-settings", type=json.loads, default={}, help="more of its `speculation`, as JSON")
    parser.add_argument("--fixed", action="store_true", help="verify all of each draft")
    parser.add_argument("--one-thread", action="store_true")
    parser.add_argument("--count", action="store_true")
    args = parser.parse_args()

    vocab_size = SHAPES[args.shape]["vocab_size"]
    tokenizer = tekken()
    if args.count:
        for name, texts in (
            ("edits", edits(tokenizer, 60, args.longest, vocab_size)),
            ("prose", prose(tokenizer, 60, args.tokens, vocab_size)),
        ):
            counts = {length: round(count_tokens_per_step(texts, length), 2) for length in (1, 3, 7, 15)}
            print(f"{name}: {len(texts)} texts; tokens a step by length of drafts: {counts}", flush=True)
        return
    clock = time.process_time if args.one_thread else time.perf_counter
    sizes = [int(size) for size in args.prose.split(",") if size]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        with LLM(
            folder,
            device=args.device,
            quantization=args.quantization,
            load_format="dummy",
            num_threads=1 if args.one_thread else None,
            max_model_len=2048,
            max_num_seqs=max([1, *sizes]),
            kv_cache="1GiB",
            speculation="auto" if args.head is None else {"method": "mtp", **args.head_settings},
            use_tqdm=False,
        ) as llm:
            drafting = Teacher(llm, clock, args.head, is_adaptive=not args.fixed)
            # An MTP head follows what others compute, too, so that its model without it has a scheduler of its own.
            plain = drafting if args.head is None else Teacher(llm, clock)
            if args.edits:
                batches = [[text] for text in edits(tokenizer, args.edits, args.longest, vocab_size)]
                print(f"edits: {measure(plain, drafting, batches)}", flush=True)
            for size in sizes:
                texts = prose(tokenizer, size * args.rounds, args.tokens, vocab_size)
                told = measure(plain, drafting, batched(texts, size))
                print(f"prose, {size} at once: {told}", flush=True)
            for teacher in {plain, drafting}:
                teacher.thread.close()


if __name__ == "__main__":
    main()
