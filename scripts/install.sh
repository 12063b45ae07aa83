#!/usr/bin/env bash
# Installs this checkout with the named extras: scripts/install.sh [EXTRA[,EXTRA…]]
# PYTHON names the interpreter of the environment that it goes into; python3 if it is not set.
# `make setup`, and so CI, and the Dockerfile call this; PIP_CONSTRAINT=constraints.txt keeps to its versions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
"$python" -m pip install --quiet --upgrade pip
"$python" -m pip install --quiet --editable ".${1:+[$1]}"
