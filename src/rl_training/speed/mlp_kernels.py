"""MLPs with two hidden layers as one Triton kernel forward and one backward, for many rows on a GPU.

Layer by layer, a small network spends its time moving activations through device memory. Here a program keeps a block
of rows and all weights on the chip; the backward kernel recomputes the activations instead of reading them. Each
program adds up the gradients of its blocks in order, and the sums are added in order, so results never vary.

Products follow `torch.set_float32_matmul_precision`: "highest" (the default) is three TF32 products that together are
as exact as float32, anything else is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

FORWARD = {"BLOCK": 64, "num_warps": 4, "num_stages": 1}
BACKWARD = {"BLOCK": 32, "num_warps": 4, "num_stages": 1}  # with two stages, two programs do not fit into shared memory
PROGRAMS = 2  # per multiprocessor: more do not fit
# Triton does not specialize kernels on the values or alignment of these: each kernel is compiled once.
SHAPE = ["count", "num_in", "num_1", "num_2", "num_out"]
MEMORY = ["x_at", "w0", "b0", "w1", "b1", "w2"]


@triton.jit
def _read(at, rows, columns, num_rows, num_columns):
    """A matrix by rows, with zeros outside."""
    inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    return tl.load(at + rows[:, None] * num_columns + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _write(at, values, rows, columns, num_rows, num_columns):
    """The part of a matrix that is inside, by rows."""
    inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    tl.store(at + rows[:, None] * num_columns + columns[None, :], values, mask=inside)


@triton.jit
def _hidden(x, weight, bias, TANH: tl.constexpr, PRECISION: tl.constexpr):
    """One layer with its activation; the weight is [in, out]."""
    y = tl.dot(x, weight, input_precision=PRECISION) + bias[None, :]
    if TANH:
        return 1.0 - 2.0 / (1.0 + tl.exp2(2.8853900817779268 * y))  # e^2y: a power of two takes fewer instructions
    return tl.where(y < 0.0, 0.0, y)  # NaN stays NaN


@triton.jit
def _slope(y, TANH: tl.constexpr):
    """The derivative of the activation, from its result."""
    return 1.0 - y * y if TANH else tl.where(y > 0.0, 1.0, 0.0)


@triton.jit(do_not_specialize=SHAPE, do_not_specialize_on_alignment=[*MEMORY, "b2", "out_at"])
def _forward(
    x_at, w0, b0, w1, b1, w2, b2, out_at, count, num_in, num_1, num_2, num_out,
    IN: tl.constexpr, ONE: tl.constexpr, TWO: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
    TANH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    into, ones, twos, outs = tl.arange(0, IN), tl.arange(0, ONE), tl.arange(0, TWO), tl.arange(0, OUT)
    first = tl.trans(_read(w0, ones, into, num_1, num_in))
    second = tl.trans(_read(w1, twos, ones, num_2, num_1))
    last = tl.trans(_read(w2, outs, twos, num_out, num_2))
    on_first = tl.load(b0 + ones, mask=ones < num_1, other=0.0)
    on_second = tl.load(b1 + twos, mask=twos < num_2, other=0.0)
    on_last = tl.load(b2 + outs, mask=outs < num_out, other=0.0)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        rows = start + tl.arange(0, BLOCK)
        one = _hidden(_read(x_at, rows, into, count, num_in), first, on_first, TANH, PRECISION)
        two = _hidden(one, second, on_second, TANH, PRECISION)
        out = tl.dot(two, last, input_precision=PRECISION) + on_last[None, :]
        _write(out_at, out, rows, outs, count, num_out)


@triton.jit(do_not_specialize=["stride", *SHAPE], do_not_specialize_on_alignment=[*MEMORY, "grad_at", "into_at"])
def _backward(
    x_at, grad_at, w0, b0, w1, b1, w2, into_at, stride, count, num_in, num_1, num_2, num_out,
    IN: tl.constexpr, ONE: tl.constexpr, TWO: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
    TANH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    into, ones, twos, outs = tl.arange(0, IN), tl.arange(0, ONE), tl.arange(0, TWO), tl.arange(0, OUT)
    first = tl.trans(_read(w0, ones, into, num_1, num_in))
    second = _read(w1, twos, ones, num_2, num_1)
    last = _read(w2, outs, twos, num_out, num_2)
    on_first = tl.load(b0 + ones, mask=ones < num_1, other=0.0)
    on_second = tl.load(b1 + twos, mask=twos < num_2, other=0.0)
    g_w0, g_b0 = tl.zeros((ONE, IN), tl.float32), tl.zeros((ONE,), tl.float32)
    g_w1, g_b1 = tl.zeros((TWO, ONE), tl.float32), tl.zeros((TWO,), tl.float32)
    g_w2, g_b2 = tl.zeros((OUT, TWO), tl.float32), tl.zeros((OUT,), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        rows = start + tl.arange(0, BLOCK)
        x = _read(x_at, rows, into, count, num_in)
        one = _hidden(x, first, on_first, TANH, PRECISION)
        two = _hidden(one, tl.trans(second), on_second, TANH, PRECISION)
        grad = _read(grad_at, rows, outs, count, num_out)
        g_w2 = tl.dot(tl.trans(grad), two, g_w2, input_precision=PRECISION)
        g_b2 += tl.sum(grad, 0)
        grad = tl.dot(grad, last, input_precision=PRECISION) * _slope(two, TANH)
        g_w1 = tl.dot(tl.trans(grad), one, g_w1, input_precision=PRECISION)
        g_b1 += tl.sum(grad, 0)
        grad = tl.dot(grad, second, input_precision=PRECISION) * _slope(one, TANH)
        g_w0 = tl.dot(tl.trans(grad), x, g_w0, input_precision=PRECISION)
        g_b0 += tl.sum(grad, 0)
    at = into_at + tl.program_id(0) * stride
    _write(at, g_w0, ones, into, num_1, num_in)
    at += num_1 * num_in
    tl.store(at + ones, g_b0, mask=ones < num_1)
    at += num_1
    _write(at, g_w1, twos, ones, num_2, num_1)
    at += num_2 * num_1
    tl.store(at + twos, g_b1, mask=twos < num_2)
    at += num_2
    _write(at, g_w2, outs, twos, num_out, num_2)
    tl.store(at + num_out * num_2 + outs, g_b2, mask=outs < num_out)


def _shape(x: Tensor, parameters: Sequence[Tensor]) -> tuple[list[int], dict[str, int]]:
    """Sizes of the layers, the input's first, and the powers of two that hold them."""
    sizes = [x.shape[1], *(len(weight) for weight in parameters[::2])]
    padded = [max(16, triton.next_power_of_2(size)) for size in sizes]
    return sizes, dict(zip(("IN", "ONE", "TWO", "OUT"), padded, strict=True))


def _launch(x: Tensor, options: dict[str, int]) -> tuple[int, dict[str, object]]:
    """The number of programs, and options of the kernel."""
    units = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    return min(triton.cdiv(len(x), options["BLOCK"]), PROGRAMS * units), {
        "PRECISION": "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32", **options,
    }  # fmt: skip


@torch.library.custom_op(
    "rl_training::mlp_forward", mutates_args=(), schema="(Tensor x, Tensor[] parameters, bool is_tanh) -> Tensor"
)
def mlp_forward(x: Tensor, parameters: Sequence[Tensor], is_tanh: bool) -> Tensor:
    """Outputs [B, out] of rows [B, in]; `parameters` are weights and biases of three layers in order."""
    sizes, padded = _shape(x, parameters)
    out = x.new_empty(len(x), sizes[-1])
    programs, options = _launch(x, FORWARD)
    with torch.cuda.device_of(x):  # Triton starts kernels on the current device
        _forward[(programs,)](x.contiguous(), *parameters, out, len(x), *sizes, **padded, TANH=is_tanh, **options)
    return out


@mlp_forward.register_fake
def _(x: Tensor, parameters: Sequence[Tensor], is_tanh: bool) -> Tensor:
    return x.new_empty(len(x), len(parameters[-1]))


@torch.library.custom_op(
    "rl_training::mlp_backward", mutates_args=(),
    schema="(Tensor x, Tensor[] grads, Tensor[] parameters, bool is_tanh) -> Tensor",
)  # fmt: skip
def mlp_backward(x: Tensor, grads: Sequence[Tensor], parameters: Sequence[Tensor], is_tanh: bool) -> Tensor:
    """Gradients [P] of the parameters of several networks in order, from those of each network's outputs."""
    programs, options = _launch(x, BACKWARD)
    sums = x.new_empty(programs, sum(p.numel() for p in parameters))
    x, at = x.contiguous(), 0
    for i, grad in enumerate(grads):
        own = parameters[6 * i : 6 * i + 6]
        sizes, padded = _shape(x, own)
        with torch.cuda.device_of(x):
            _backward[(programs,)](
                x, grad.contiguous(), *own[:5], sums[:, at:], sums.shape[1], len(x), *sizes, **padded, TANH=is_tanh,
                **options,
            )  # fmt: skip
        at += sum(p.numel() for p in own)
    return sums.sum(0)


@mlp_backward.register_fake
def _(x: Tensor, grads: Sequence[Tensor], parameters: Sequence[Tensor], is_tanh: bool) -> Tensor:
    return x.new_empty(sum(p.numel() for p in parameters))
