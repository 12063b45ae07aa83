#!/usr/bin/env python3
"""Turns a checkpoint into a Hugging Face folder: python3 scripts/model_merger.py --local_dir …/global_step_N/actor."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout works without installing

from foveal.cli import main

if __name__ == "__main__":
    sys.exit(main(["merge", *sys.argv[1:]]))
