"""`pytest -m quick`: what shows in a minute that most of the engine is right.

The tests that run every golden are marked for some goldens, which together have every fact of a model (facts.py). In
the others, whole files are marked, which this list names with what they cost. It is the one place for
marks: a test elsewhere says nothing of being quick.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

MAX_CPU_SECONDS = 50  # less than a minute, with what importing and collecting take

CPU_SECONDS = {
    "tests/config/test_config.py": 0.9,
    "tests/config/test_config_files.py": 0.9,
    "tests/config/test_families.py": 0.6,
    "tests/config/test_rope.py": 0.1,
    "tests/config/test_spellings.py": 0.1,
    "tests/config/test_text_part.py": 0.1,
    "tests/core/test_tensor.py": 5.0,
    "tests/docs/test_api_page.py": 0.1,
    "tests/docs/test_blocks.py": 1.1,
    "tests/docs/test_docstrings.py": 0.1,
    "tests/docs/test_form.py": 0.1,
    "tests/docs/test_named_tests.py": 0.1,
    "tests/gguf_files/test_dequantise.py": 1.4,
    "tests/gguf_files/test_header.py": 0.1,
    "tests/loader/test_checkpoint.py": 2.7,
    "tests/loader/test_resolve_model.py": 0.1,
    "tests/images/test_processor.py": 0.3,
    "tests/lora/test_families.py": 1.1,
    "tests/model/test_layer_caches.py": 0.1,
    "tests/model/test_specs.py": 0.1,
    "tests/ops/test_bad_input.py": 0.3,
    "tests/ops/test_oracle.py": 0.1,
    "tests/ops/test_rope.py": 1.3,
    "tests/package/test_layers.py": 0.1,
    "tests/package/test_private_names.py": 0.3,
    "tests/package/test_signatures.py": 0.1,
    "tests/quantised_files/test_arithmetic.py": 0.1,
    "tests/quantised_files/test_errors.py": 0.6,
    "tests/quantised_files/test_reading.py": 3.2,
    "tests/scheduler/test_block_plan.py": 0.1,
    "tests/scheduler/test_scheduler.py": 8.6,
    "tests/speculation/test_scheduling.py": 1.4,
    "tests/test_checks.py": 0.2,
    "tests/test_covering.py": 0.1,
    "tests/test_facts.py": 3.5,
    "tests/test_files.py": 0.3,
    "tests/test_goldens.py": 0.6,
    "tests/test_outputs.py": 0.1,
    "tests/test_patterns.py": 0.7,
    "tests/test_planted_faults.py": 0.1,
    "tests/test_sampling_params.py": 0.1,
    "tests/text/test_chat.py": 0.2,
    "tests/text/test_constraint.py": 0.5,
    "tests/text/test_detokenize.py": 2.2,
    "tests/text/test_generation_config.py": 0.1,
    "tests/text/test_json_schema.py": 0.2,
    "tests/text/test_messages.py": 0.2,
    "tests/text/test_reasoning.py": 0.1,
    "tests/text/test_token_bound.py": 0.3,
    "tests/text/test_tokenizer.py": 0.2,
    "tests/text/test_tool_calls.py": 0.1,
    "tests/vocabulary/test_published_forms.py": 0.2,
}
"""{file: its CPU seconds} as `pytest --cpu-times` measured them, no less than 0.1."""

CPU_SECONDS_OF_GOLDEN = {
    "tests/dist/test_tensor_parallel.py::test_golden": 0.04,
    "tests/engine/test_hooks.py::test_every_site_of_the_core_has_names": 0.01,
    "tests/engine/test_infer_engine.py::test_logits_are_those_of_llm": 0.02,
    "tests/llm/test_every_family.py::test_sites_and_bits": 0.04,
    "tests/llm/test_llm.py::test_greedy_tokens_are_those_of_transformers": 0.02,
    "tests/models/test_reference_model.py::test_logits_and_greedy_tokens_are_those_of_transformers": 0.03,
}
"""{test with a parameter `name`: its CPU seconds of one golden}."""


@functools.cache
def cover() -> frozenset[str]:
    """Goldens that together have every fact."""
    import facts  # which imports the core; a run without the mark collects without it

    return frozenset(facts.greedy_cover(facts.facts_of_goldens()))


def is_asked_for(config: pytest.Config) -> bool:
    return config.getoption("markexpr", "") == "quick"


def has_quick_tests(file: str) -> bool:
    """`file`: its path below the repository's root."""
    return file in CPU_SECONDS or any(test.startswith(f"{file}::") for test in CPU_SECONDS_OF_GOLDEN)


def is_quick(item: pytest.Item) -> bool:
    file, _, _ = item.nodeid.partition("::")
    if file in CPU_SECONDS:
        return True
    if item.nodeid.partition("[")[0] not in CPU_SECONDS_OF_GOLDEN:
        return False
    return item.callspec.params["name"] in cover()  # type: ignore[attr-defined]  # of pytest.Function


def estimated_cpu_seconds() -> float:
    return sum(CPU_SECONDS.values()) + len(cover()) * sum(CPU_SECONDS_OF_GOLDEN.values())


def path_of(file: Path, config: pytest.Config) -> str:
    """The path of a file below the repository's root, as the ids of its tests begin."""
    return file.relative_to(config.rootpath).as_posix()
