"""Chat templates of real models are recognised as what they are. They are not part of this repository; the sdist of
llama-cpp-python has them:

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz --strip-components 5 --wildcards '*/models/templates/*.jinja'
    INFINILM_CHAT_TEMPLATES=$PWD pytest tests/text/test_real_templates.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infinilm.text.chat_formats import chat_format

FOLDER = os.environ.get("INFINILM_CHAT_TEMPLATES")
FORMATS = {
    "apertus": ["Apertus-8B-Instruct"],
    "command r7b": ["CohereForAI-c4ai-command-r7b-12-2024-tool_use"],
    "deepseek v3": ["deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"],
    "deepseek v3.1": ["deepseek-ai-DeepSeek-V3.1"],
    "deepseek v3.2": ["deepseek-ai-DeepSeek-V3.2"],
    "gemma 4": ["google-gemma-4-31B-it"],
    "glm": ["GLM-4.6", "GLM-4.7-Flash"],
    "granite 3": ["ibm-granite-granite-3.3-2B-Instruct"],
    "harmony": ["openai-gpt-oss-120b"],
    "hermes": [
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        "Qwen-QwQ-32B",
        "Qwen-Qwen2.5-7B-Instruct",
        "Qwen-Qwen3-0.6B",
        "ibm-granite-granite-4.0",
    ],
    "kimi k2": ["Kimi-K2-Instruct", "Kimi-K2-Thinking", "moonshotai-Kimi-K2"],
    "lfm2": ["LFM2-8B-A1B", "LFM2.5-8B-A1B"],
    "llama3": ["meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct"],
    "minimax m2": ["MiniMax-M2"],
    "mistral": ["mistralai-Mistral-Nemo-Instruct-2407"],
    "mistral ids": ["Mistral-Small-3.2-24B-Instruct-2506"],
    "mistral names": ["mistralai-Ministral-3-14B-Reasoning-2512", "unsloth-mistral-Devstral-Small-2507"],
    "nemotron": ["NVIDIA-Nemotron-Nano-v2"],
    "phi 4 mini": ["fireworks-ai-llama-3-firefunction-v2"],
    "plain": [
        "Apriel-1.6-15b-Thinker-fixed",
        "CohereForAI-c4ai-command-r-plus-tool_use",
        "MiniMax-M1",
        "google-gemma-2-2b-it",
        "meetkai-functionary-medium-v3.1",
        "meetkai-functionary-medium-v3.2",
        "microsoft-Phi-3.5-mini-instruct",
    ],
    "qwen3 coder": ["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen3-Coder", "Qwen3.5-4B", "StepFun3.5-Flash"],
    "seed oss": ["ByteDance-Seed-OSS"],
}

pytestmark = pytest.mark.skipif(FOLDER is None, reason="INFINILM_CHAT_TEMPLATES names no folder with chat templates")


@pytest.mark.parametrize(("name", "file"), [(name, file) for name, files in FORMATS.items() for file in files])
def test_templates_are_recognised(name: str, file: str) -> None:
    found = chat_format((Path(FOLDER or "") / f"{file}.jinja").read_text("utf-8"))
    assert found.name == name
    marks = {"apertus": "<|inner_suffix|>", "command r7b": "<|END_THINKING|>", "gemma 4": "<channel|>"}
    if name in marks:
        assert found.reasoning is not None and found.reasoning[1] == marks[name]
