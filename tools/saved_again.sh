#!/usr/bin/env bash
# Whether models are read that the newest transformers saves: configurations of all golden families, and checkpoints.
#
#     tools/saved_again.sh [name ...]
#
# Run it in an environment with infinilm and what its tests need, before a release and when transformers has one. It
# fetches the newest transformers, and torch, to a folder of their own that goes before the packages of the environment;
# PACKAGES=FOLDER keeps that folder, or names one that has both. torch is as large as the indexes of pip's configuration
# have it: 200 MB for CPUs alone, and some GB with CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PACKAGES:-}" ]; then
    PACKAGES=$(mktemp -d)
    trap 'rm -rf "$PACKAGES"' EXIT
fi
if [ ! -d "$PACKAGES/torch" ]; then
    python -m pip install -q --upgrade --target "$PACKAGES" torch transformers
fi
export PYTHONPATH=$PACKAGES
python -c 'import torch, transformers; print("transformers", transformers.__version__, "and torch", torch.__version__)'
pytest -q -p no:cacheprovider tests/config/test_saved_again.py
python tools/check_saved_again.py "$@"
