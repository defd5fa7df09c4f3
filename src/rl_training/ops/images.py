"""Augmentation of images."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_shifts(count: int, pixels: int, generator: torch.Generator) -> Tensor:
    """Whole numbers [count, 2] from -pixels to pixels, each as likely as the others."""
    return torch.randint(-pixels, pixels + 1, (count, 2), generator=generator, device=generator.device)


def shift_images(images: Tensor, shifts: Tensor) -> Tensor:
    """Move each image of [B, C, H, W] by its own `shifts` [B, 2], down and to the right, all of its channels together.

    Pixels that enter at a border repeat it, so this is a crop of an image that was padded with its border
    (Yarats et al. 2021, arXiv:2107.09645). Their code interpolates between pixels; for whole numbers that is the same.
    """
    height, width = images.shape[-2:]
    rows = _sources(height, shifts[:, 0])[:, None, :, None]
    columns = _sources(width, shifts[:, 1])[:, None, None, :]
    index, channels = (torch.arange(size, device=images.device) for size in images.shape[:2])
    return images[index[:, None, None, None], channels[:, None, None], rows, columns]


def _sources(size: int, shifts: Tensor) -> Tensor:
    """The indices [B, size] from which a moved row takes its pixels."""
    return (torch.arange(size, device=shifts.device) - shifts.unsqueeze(1)).clamp(0, size - 1)
