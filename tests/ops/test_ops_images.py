"""Shifts of images: a border that repeats, whole pixels, one shift per image, and the published code as a reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.ops.images import draw_shifts, shift_images


def make_images(count: int = 5, size: int = 12) -> Tensor:
    draws = torch.Generator().manual_seed(0)
    return torch.randint(256, (count, 3, size, size + 2), dtype=torch.uint8, generator=draws)


def test_a_shift_is_a_crop_of_an_image_padded_with_its_border() -> None:
    images, shifts = make_images(), draw_shifts(5, 4, torch.Generator().manual_seed(1))
    padded = F.pad(images.float(), (4, 4, 4, 4), mode="replicate")
    crops = [x[:, 4 - dy : 16 - dy, 4 - dx : 18 - dx] for x, (dy, dx) in zip(padded, shifts.tolist(), strict=True)]
    shifted = shift_images(images, shifts)
    assert shifted.dtype == torch.uint8
    assert torch.equal(shifted.float(), torch.stack(crops))
    assert torch.equal(shift_images(images, torch.zeros_like(shifts)), images)


def test_it_is_the_interpolation_of_the_published_code() -> None:
    """drqv2.py, RandomShiftsAug.forward, with the draws given; for images that are as high as wide."""
    images, pad = make_images()[..., :12].float(), 4
    count, _, size, _ = images.shape
    drawn = torch.randint(0, 2 * pad + 1, (count, 1, 1, 2), generator=torch.Generator().manual_seed(2))
    padded = F.pad(images, (pad,) * 4, mode="replicate")
    eps = 1.0 / (size + 2 * pad)
    line = torch.linspace(-1.0 + eps, 1.0 - eps, size + 2 * pad)[:size]
    line = line.unsqueeze(0).repeat(size, 1).unsqueeze(2)
    grid = torch.cat([line, line.transpose(1, 0)], dim=2).unsqueeze(0).repeat(count, 1, 1, 1)
    grid = grid + drawn.float() * (2.0 / (size + 2 * pad))
    published = F.grid_sample(padded, grid, padding_mode="zeros", align_corners=False)
    ours = shift_images(images, pad - drawn.view(count, 2).flip(-1))  # theirs are (x, y), from the padded corner
    torch.testing.assert_close(ours, published, rtol=0, atol=3e-3)


def test_shifts_are_whole_numbers_that_reach_both_ends_equally_often() -> None:
    shifts = draw_shifts(20_000, 2, torch.Generator().manual_seed(0))
    assert not shifts.is_floating_point()
    for axis in (0, 1):
        shares = (shifts[:, axis] + 2).bincount() / len(shifts)
        assert shares == pytest.approx([0.2] * 5, abs=0.015)
    assert (shifts[:, 0] != shifts[:, 1]).float().mean() == pytest.approx(0.8, abs=0.02)
