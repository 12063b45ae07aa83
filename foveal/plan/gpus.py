"""The GPUs that a run may be planned for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from foveal.errors import ConfigError
from foveal.models.flops import peak_of


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        name: as given to `--gpu`.
        gib: of its memory, as torch reports it: less than its name says.
        bandwidth: of its memory, bytes per second, from the vendor's data sheet.
        link: bytes per second that a GPU gets from the others of its machine: a little more than half of NVLink's rate
            in one direction, as measured between two H200s, or about four fifths of PCI Express's.
    """

    name: str
    gib: float
    bandwidth: float
    link: float

    @property
    def bytes(self) -> int:
        return int(self.gib * 2**30)

    @property
    def peak(self) -> float:
        """Dense bf16 matrix products, FLOP per second."""
        peak = peak_of(self.name.upper())
        assert peak is not None
        return peak


GPUS = [
    Gpu("3090-24", 23.6, 0.94e12, 20e9),
    Gpu("4090-24", 23.5, 1.01e12, 20e9),
    Gpu("a100-40", 39.4, 1.56e12, 160e9),
    Gpu("l20-48", 44.4, 0.86e12, 20e9),
    Gpu("l40-48", 44.4, 0.86e12, 20e9),
    Gpu("a100-80", 79.1, 2.04e12, 160e9),
    Gpu("a800-80", 79.1, 2.04e12, 107e9),
    Gpu("h100-80", 79.1, 3.35e12, 240e9),
    Gpu("h800-80", 79.1, 3.35e12, 107e9),
    Gpu("h20-96", 95.6, 4.0e12, 240e9),
    Gpu("h200-141", 139.8, 4.8e12, 240e9),
]
BY_SIZE = {"24": "4090-24", "40": "a100-40", "48": "l40-48", "80": "h100-80", "141": "h200-141"}
"""What a number of gigabytes alone stands for; these are also those of the table."""
_MAKERS = {"nvidia", "geforce", "rtx", "tesla"}


def find_gpu(text: str) -> Gpu:
    """The GPU of a name as `h100-80`, `H100 80GB` or `RTX 4090`, or of a number of gigabytes.

    Raises:
        ConfigError: it isn't known, or several are meant; lists those that are.
    """
    words = [word for word in re.split(r"[\s_-]+", text.strip().lower()) if word not in _MAKERS]
    name = "-".join(words).removesuffix("gb").removesuffix("-")
    name = BY_SIZE.get(name, name)
    alike = [gpu for gpu in GPUS if name in (gpu.name, gpu.name.split("-")[0])]
    if len(alike) == 1:
        return alike[0]
    if alike:
        raise ConfigError(f"--gpu: {text!r} given, of which there are {' and '.join(gpu.name for gpu in alike)}.")
    raise ConfigError(
        f"--gpu: {text!r} given; allowed: {', '.join(gpu.name for gpu in GPUS)}, or a number of gigabytes: "
        f"{', '.join(BY_SIZE)}. For another GPU take one of as much memory or less; how many there are is "
        "trainer.n_gpus_per_node."
    )


def gpu_here() -> Gpu | None:
    """The GPU of this machine, with its own memory; None without one, or where its kind isn't known."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    gib = properties.total_memory / 2**30
    words = re.findall(r"[A-Z]*\d+", properties.name)
    alike = [gpu for gpu in GPUS if gpu.name.split("-")[0].upper() in words]
    if not alike:
        return None
    like = min(alike, key=lambda gpu: abs(gpu.gib - gib))
    return Gpu(like.name, gib, like.bandwidth, like.link)
