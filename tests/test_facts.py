"""Every fact of a model has a golden checkpoint that tells it, and the quick tests run every fact in a minute."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import facts
import numpy as np
import pytest
import quick
from goldens import expected_of, golden
from hypothesis import given, strategies as st

from infinilm import AutoConfig, ReferenceModel, _core
from infinilm.config.spec import build_spec

ROOT = Path(__file__).parents[1]


def test_every_fact_has_a_golden() -> None:
    missing = set(facts.possible_facts()) - facts.all_facts() - facts.WITHOUT_GOLDEN.keys()
    assert not missing, (
        f"no golden has {', '.join(sorted(missing))}; add a checkpoint to tools/make_golden.py whose family sets it, "
        "or the reason why there is none to facts.WITHOUT_GOLDEN"
    )
    layouts = facts.LAYOUTS.keys() - facts.all_facts()
    assert not layouts, f"no golden has {', '.join(sorted(layouts))}; add one to tools/make_golden.py"


def test_reasons_are_of_facts_without_a_golden() -> None:
    possible = set(facts.possible_facts())
    for fact, reason in facts.WITHOUT_GOLDEN.items():
        assert fact in possible, f"{fact} is no fact of a specification any more; remove it from WITHOUT_GOLDEN"
        assert fact not in facts.all_facts(), f"{fact} has a golden now; remove it from WITHOUT_GOLDEN"
        assert reason


def test_every_struct_of_a_specification_has_facts() -> None:
    """CacheSpec and CostSpec follow from the others; the kinds of caches are facts of their own.

    No golden has an MTP head, which a caller asks for: tests/model/test_mtp_head.py has those. Towers have goldens of
    their own, tests/golden_vision.
    """
    specs = {spec for name, spec in vars(_core).items() if name.endswith("Spec")}
    assert specs - set(facts.ROOMS) == {_core.CacheSpec, _core.CostSpec, _core.MtpSpec, _core.TowerSpec}


def test_facts_of_a_golden() -> None:
    found = facts.facts_of_golden("qwen3-next")
    assert {
        *("AttentionSpec.qk_norm=head", "AttentionSpec.output_gate=True", "cache=none", "cache=paged"),
        *("DeltaSpec.conv_size=set", "ExpertsSpec.shared_gate=True", "layers have several kinds of mixers"),
    } <= found
    assert "cache=latent" not in found and "LayerSpec.mixer=LatentSpec" not in found


@given(st.dictionaries(st.text("abcdef", min_size=1), st.frozensets(st.integers(0, 9)), min_size=1))
def test_a_cover_has_everything_and_nothing_spare(sets: dict[str, frozenset[str]]) -> None:
    cover = facts.greedy_cover(sets)
    everything = frozenset().union(*sets.values())
    assert frozenset().union(*(sets[name] for name in cover)) == everything
    for name in cover:
        assert frozenset().union(*(sets[other] for other in cover if other != name)) != everything


# ---- quick tests ----


def test_the_quick_goldens_have_every_fact() -> None:
    found = facts.facts_of_goldens()
    assert set().union(*(found[name] for name in quick.cover())) == facts.all_facts()
    assert len(quick.cover()) < len(found) / 3


def test_some_quick_golden_tells_each_fact() -> None:
    """A planted fault for every fact that a specification says: the numpy model does not know it.

    The engine is held against this model at every site of the same goldens (tests/llm/test_every_family.py), so an
    engine that does not know a fact is noticed, too.
    """
    untold = list(facts.wrong_facts())  # (room, field, value, wrong value)
    assert len(untold) > 50
    for name in sorted(quick.cover()):
        expected, config = expected_of(name), AutoConfig.from_pretrained(golden(name))
        max_model_len = int(expected["max_model_len"])
        model = ReferenceModel.from_pretrained(golden(name), dtype="float64", max_model_len=max_model_len)
        right = expected["logits"]
        still: list[tuple[str, str, Any, Any]] = []
        for fault in untold:
            model.spec = build_spec(config, dtype="float32", max_model_len=max_model_len)
            is_told = facts.change_field(model.spec, *fault)
            # Otherwise the weights that are there do not fit, or others are asked for.
            with contextlib.suppress(KeyError, ValueError):
                is_told &= np.abs(model.forward(expected["input_ids"]) - right).max() > 1e-4 * np.abs(right).max()
            if not is_told:
                still.append(fault)
        untold = still
    assert not untold, "no quick golden has other logits with these faults"


def test_quick_tests_take_a_minute() -> None:
    seconds = quick.estimated_cpu_seconds()
    assert seconds <= quick.MAX_CPU_SECONDS, (
        f"`pytest -m quick` takes about {seconds:.0f} CPU seconds, more than {quick.MAX_CPU_SECONDS}; leave a file of "
        "quick.CPU_SECONDS out, or make it cheaper"
    )


@pytest.mark.parametrize("test", [*quick.CPU_SECONDS, *quick.CPU_SECONDS_OF_GOLDEN])
def test_listed_tests_exist(test: str) -> None:
    file, _, function = test.partition("::")
    assert f"def {function or 'test_'}" in (ROOT / file).read_text()


def test_of_every_kind_of_test_some_are_quick() -> None:
    """A folder without a quick test is one whose tests need a build, a server or an emulator."""
    folders = {file.partition("/")[2].partition("/")[0] for file in (*quick.CPU_SECONDS, *quick.CPU_SECONDS_OF_GOLDEN)}
    with_tests = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert with_tests - folders == {"bench_tools", "cuda", "router", "cli", "server"}


def test_only_marked_tests_are_collected() -> None:
    command = [sys.executable, "-m", "pytest", "-m", "quick", "--collect-only", "-p", "no:cacheprovider"]
    files = ["tests/llm/test_every_family.py", "tests/core/test_tensor.py", "tests/llm/test_stress.py"]
    run = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    collected = [line for line in run.stdout.splitlines() if "::" in line]
    families = {line.partition("[")[2].rstrip("]") for line in collected if "test_sites_and_bits" in line}
    assert families == quick.cover()
    assert any("core/test_tensor.py" in line for line in collected)
    assert not any("test_stress.py" in line for line in collected)
