"""The first layer of a vision tower as the matrix product that it is."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def multiply_patches(tower: Any) -> None:
    """Lets the patch embedding compute by a matrix product.

    Its kernel is as large as a patch, so that each output is one product; as a convolution it takes as long as four
    blocks of the tower.
    """
    embed = tower.patch_embed
    if isinstance(embed.proj, nn.Conv3d) and embed.proj.kernel_size == embed.proj.stride:
        embed.forward = MethodType(_forward, embed)


def _forward(embed: Any, patches: torch.Tensor) -> torch.Tensor:
    proj = embed.proj
    if type(proj) is not nn.Conv3d:  # an adapter computes with weights of its own
        hidden: torch.Tensor = type(embed).forward(embed, patches)
        return hidden
    return F.linear(patches.to(proj.weight.dtype), proj.weight.flatten(1), proj.bias)
