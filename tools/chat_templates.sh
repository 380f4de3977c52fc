#!/usr/bin/env bash
# Chat templates of real models, for tests/text, of pinned public packages: tools/chat_templates.sh FOLDER [SDIST]
# SDIST is that of llama-cpp-python, where it has been fetched already. What cannot be fetched is told and left out.
set -uo pipefail
folder=$(realpath -m "$1")
mkdir -p "$folder"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fetch() { timeout 300 "${PIP:-pip}" download -q --no-deps -d "$work" "$@"; }
missing() { echo "$1 cannot be fetched: its chat templates are not tested" >&2; }

sdist=${2:-$work/llama_cpp_python-0.3.36.tar.gz}
if [ -e "$sdist" ] || fetch --no-binary llama-cpp-python llama-cpp-python==0.3.36; then
    tar xzf "$sdist" -C "$folder" --strip-components 5 --wildcards '*/models/templates/*.jinja'
else
    missing llama-cpp-python
fi

# Templates of releases that the former has not.
if fetch --only-binary :all: trl==1.16.0 && python3 -m zipfile -e "$work"/trl-*.whl "$work/trl"; then
    for name in cohere deepseekv3 gemma3 gemma4_v5 glm4moe lfm2 lfm2_2_5 lfm2_2_5_v2 llama3_2 nemotron_3_super \
        nemotron_3_ultra qwen3_6 qwen3_8 qwen3_instruct_2507 qwen3_vl; do
        cp "$work/trl/trl/chat_templates/$name.jinja" "$folder/trl-$name.jinja"
    done
else
    missing trl
fi

# Templates for tools. The build of vllm wants torch, and so pip stops behind what is wanted here: it has unpacked them.
TMPDIR=$work fetch --no-binary vllm --no-build-isolation --no-clean vllm==0.33.0 >/dev/null 2>&1
examples=$(find "$work" -path '*/examples/*' -name 'tool_chat_template_functiongemma.jinja' -printf '%h\n' | head -1)
if [ -n "$examples" ]; then
    for name in apertus deepseekr1 deepseekv3 functiongemma gemma3_pythonic gemma4 glm4 granite hermes hunyuan_a13b \
        internlm2_tool llama3.1_json llama3.2_pythonic llama4_json llama4_pythonic mistral mistral_parallel phi4_mini \
        toolace; do
        cp "$examples/tool_chat_template_$name.jinja" "$folder/vllm-$name.jinja"
    done
else
    missing vllm
fi
