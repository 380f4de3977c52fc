"""What `activations` takes, and what it refuses before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quantised_files.conversion import quantise
from quantised_files.writers import Format, awq, ct_fp8, fp8_block

from infinilm import LLM, plan_memory
from infinilm.checkpoint.folder import resolve_model
from infinilm.errors import ConfigError
from infinilm.planning.memory import plan_headers

DEMO = resolve_model("demo")
# As on a machine with such a GPU: memory is given, so that none need be there.
GPU = {"device": "cuda", "memory": "1GiB", "max_num_seqs": 2}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"activations": "int8"}, "activations: expected 'auto', 'fp8' or 'dtype', got 'int8'"),
        ({"activations": None}, "activations: expected 'auto', 'fp8' or 'dtype', got None"),
        ({"activations": "fp8", "device": "cpu"}, r"works on GPUs of compute capability 8\.9 and later"),
        ({"activations": "fp8", **GPU}, r"no linear of this model has FP8 weights .*; pass quantization='fp8'"),
        ({"activations": "fp8", "quantization": "int8", **GPU}, "no linear of this model has FP8 weights"),
        (
            {"activations": "fp8", "quantization": "fp8", "dtype": "float32", **GPU},
            "quantization='fp8' on a GPU is of models that compute in 16 bits",
        ),
    ],
)
def test_what_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plan_memory("demo", **settings)


def test_float32_is_refused(tmp_path: Path) -> None:
    quantise(DEMO, tmp_path / "fp8", ct_fp8("channel"))
    with pytest.raises(ConfigError, match="activations='fp8' is of models that compute in 16 bits"):
        plan_headers(tmp_path / "fp8", {"activations": "fp8", "dtype": "float32", **GPU})


def test_a_cpu_refuses_it() -> None:
    with pytest.raises(ConfigError, match="on a CPU leave it out"):
        LLM("demo", activations="fp8", use_tqdm=False)


@pytest.mark.parametrize(
    ("form", "rounded"),
    [
        (ct_fp8("channel"), ("fp8 per token",)),
        (ct_fp8("tensor"), ("fp8 per token",)),
        (fp8_block((128, 128), "F32"), ("fp8 per 128 of a token",)),
        (fp8_block((64, 64), "F32"), ()),
        (awq(64), ()),
    ],
    ids=repr,
)
def test_what_a_checkpoint_asks_for(form: Format, rounded: tuple[str, ...], tmp_path: Path) -> None:
    """On a GPU that is not here, and so may have the tensor cores; with "dtype" nothing is rounded."""
    quantise(DEMO, tmp_path / "quantised", form)
    plan = plan_headers(tmp_path / "quantised", GPU)
    assert (plan.formats[0].rounded_inputs, plan.fp8_inputs) == (rounded, bool(rounded))
    plain = plan_headers(tmp_path / "quantised", {"activations": "dtype", **GPU})
    assert not plain.formats[0].rounded_inputs and not plain.fp8_inputs
    assert plan.memory.workspace_bytes - plain.memory.workspace_bytes == (32 << 20 if rounded else 0)
    merged = plan_headers(tmp_path / "quantised", {"device": "cpu"})
    assert not merged.fp8_inputs
