#!/usr/bin/env python3
"""Turns a checkpoint into a Hugging Face folder: python3 scripts/model_merger.py --local_dir …/global_step_N/actor."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout works without installing

from foveal.train.export import merge_command

if __name__ == "__main__":
    sys.exit(merge_command(sys.argv[1:]))
