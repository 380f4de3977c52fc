"""The benchmark of drafts gives the answers that it says it gives, and counts their steps."""

from __future__ import annotations

import json
import time
from pathlib import Path

from bench.speculation import Teacher, Text, measure
from bench.synthetic import SHAPES
from infinilm import LLM


def test_answers_are_given(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["tiny"]))
    prompt = [5, 6, 7, 8] * 8
    texts = [Text([number, *prompt], prompt * 3) for number in range(2)]
    settings = {"load_format": "dummy", "max_model_len": 256, "max_num_seqs": 2, "use_tqdm": False}
    with LLM(str(tmp_path), **settings) as llm:
        teacher = Teacher(llm, time.perf_counter)
        told = measure(teacher, teacher, [texts])
        teacher.thread.close()
    ratio, num_steps = told.split("x  (")[0], int(told.split("steps ")[1].split(" to ")[0])
    assert float(ratio) > 0
    assert num_steps == 1 + 96  # without drafts: the prompts, then a step for each token
