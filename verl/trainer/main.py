"""EasyR1's entry point: `python3 -m verl.trainer.main …` is `foveal train …` with the same arguments."""

from __future__ import annotations

import sys

from foveal.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
