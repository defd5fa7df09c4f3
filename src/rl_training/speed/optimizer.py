"""Parameters as one flat tensor, the optimizers over it (gradient, clipping and step in one call), and target networks.

An update of a small network is mostly overhead, not arithmetic. With one flat tensor, the gradient norm, Adam, a
target copy and a Polyak step are one operation each, for any number of layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.ops.distributional import carry_over
from rl_training.speed.private_torch import adam_step, concatenate, differentiate

Gradients = Sequence[Tensor | None]
Backward = Callable[..., Gradients]
# regardless of a learner's options
PLAIN_ADAM: dict[str, Any] = {"kind": "adam", "eps": 1e-8, "max_grad_norm": None, "beta1": 0.9}
OPTIMIZERS = ("adam", "adamw", "radam", "rmsprop", "rmsprop_tf", "sgd")
WITH_MEAN = ("adam", "adamw", "radam")  # of the gradients
MOST_PIECES, LEAST_PIECE, ALIGNED = 32, 1_024, 4  # how a GPU's flat parameters are split (see `split_evenly`)
BLOCK = 65_536  # elements that Adam's kernel assigns to one multiprocessor; a shorter tensor gets one too


def flatten_parameters(parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], Tensor]:
    """Move parameters into one tensor [P] and make each a view of it; returns them and the tensor."""
    params = [p for p in parameters if p.requires_grad]
    if not params:
        raise UserError("the network has no trainable parameters.")
    return params, join_parameters(params)


def join_parameters(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor [P], of which each of the parameters becomes a view."""
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    offset = 0
    for p in parameters:
        p.data = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    return flat


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as one [P], without a copy if they are its consecutive pieces (as from a written-out pass)."""
    first = tensors[0]
    end = start = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous():
            return concatenate(tensors)
        end += tensor.nbytes
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():  # adjacent in memory, but not in one storage
        return concatenate(tensors)
    return first.as_strided(((end - start) // first.itemsize,), (1,))


def split_evenly(flat: Tensor) -> tuple[Tensor, ...]:
    """Split [P] into pieces that are aligned to four numbers; do not split if P fills enough blocks anyway.

    On an H200, Adam's step takes 27 microseconds in one piece and 5 in 32 for 140,000 parameters, and 77 and 106 for
    10 million.
    """
    if len(flat) > MOST_PIECES * BLOCK:
        return (flat,)
    size = max(LEAST_PIECE, -(-len(flat) // MOST_PIECES))
    return flat.split(-(-size // ALIGNED) * ALIGNED)


def _number(option: str) -> Any:
    """A property that reads an option: the first of its values that is set, where a string is a name in `numbers`."""

    def read(optimizer: Optimizer) -> Any:
        for value in optimizer._options[option]:
            found = optimizer._numbers[value] if isinstance(value, str) else value
            if found is not None:
                return found
        return None

    return property(read)


class Optimizer(nn.Module):
    """Adam, AdamW, RAdam, RMSProp (torch's, or TensorFlow's with epsilon inside the root) or SGD over flat parameters.

    It is a module, so that its moments are in the algorithm's `state_dict`. `learning_rate`, `eps` and `max_grad_norm`
    may be names in the table `numbers`, which is read at every step; of two names the first that is set counts.
    `weight_decay` is AdamW's. The optimizer of a module calls `project_()` of each of its parts that has this method,
    after every step: it puts parameters back where they must be, in place, as a function of tensors.
    """

    ranks: Any = None  # the other learners of a distributed run (run/ranks.py); None in a run of one process
    learning_rate = _number("learning_rate")
    eps = _number("eps")
    max_grad_norm = _number("max_grad_norm")

    def __init__(
        self, parameters: nn.Module | Iterable[nn.Parameter], *, learning_rate: float | str | tuple[str, str],
        kind: str = "adam", eps: float | str = 1e-8, max_grad_norm: float | str | None = None, decay: float = 0.99,
        beta1: float = 0.9, weight_decay: float = 0.01, numbers: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if kind not in OPTIMIZERS:
            raise UserError(f"optimizer is {kind!r}; it must be one of {', '.join(OPTIMIZERS)}.")
        self._numbers = {} if numbers is None else numbers
        rates = learning_rate if isinstance(learning_rate, tuple) else (learning_rate,)
        self._options = {"learning_rate": rates, "eps": (eps,), "max_grad_norm": (max_grad_norm,)}
        if self.learning_rate < 0:
            raise UserError(f"learning_rate is {self.learning_rate}; it must be at least 0.")
        parts: Iterable[Any] = ()
        if isinstance(parameters, nn.Module):
            parts, parameters = parameters.modules(), parameters.parameters()
        self._projected = tuple(part for part in parts if hasattr(part, "project_"))
        params, flat = flatten_parameters(parameters)
        self._params, self.flat = tuple(params), flat  # plain attributes: the networks own the parameters
        self._one = flat.new_ones(())
        self.kind, self.decay, self.beta1, self.weight_decay = kind, decay, beta1, weight_decay
        self.mean: Tensor
        self.square: Tensor
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), device=flat.device))
        if kind in WITH_MEAN:
            self.register_buffer("mean", torch.zeros_like(flat))
        if kind != "sgd":
            self.register_buffer("square", torch.full_like(flat, 1.0 if kind == "rmsprop_tf" else 0.0))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Join the parameters of a copy: copying a parameter does not copy the flat tensor that it is a view of."""
        super().__setstate__(state)
        self.flat = join_parameters(self._params)

    def step(self, loss: Tensor) -> Tensor:
        """Differentiate a loss, clip, and update the parameters; return the gradient norm before clipping."""
        return self.apply_gradients(differentiate((loss,), (self._one,), inputs=self._params))

    def trace(self, network: Any, *inputs: Any, call: Callable[..., Any] | None = None) -> tuple[Any, Backward]:
        """Outputs of a network (or of its method `call`) without an autograd graph, and a function that maps a loss's
        slopes at them to parameter gradients: the network's own (`network.trace`) if it has one, else autograd's."""
        own = network.trace(*inputs) if hasattr(network, "trace") else None
        if own is not None:
            return own
        outputs = (call or network)(*inputs)
        tensors = (outputs,) if isinstance(outputs, Tensor) else outputs

        def backward(*slopes: Tensor | None) -> Gradients:
            given = [pair for pair in zip(tensors, slopes, strict=True) if pair[1] is not None]
            outputs, on_outputs = zip(*given, strict=True)
            return differentiate(outputs, on_outputs, inputs=self._params)

        detached = [tensor.detach() for tensor in tensors]
        return detached[0] if isinstance(outputs, Tensor) else type(outputs)(*detached), backward

    def add_gradients(self, gradients: Gradients, loss: Tensor) -> Gradients:
        """The given gradients plus those of one more loss."""
        more = torch.autograd.grad(loss, self._params, allow_unused=True)
        return [x if y is None else y if x is None else x + y for x, y in zip(gradients, more, strict=True)]

    def apply_gradients(self, gradients: Gradients) -> Tensor:
        """Clip the given gradients (one per parameter, in order, without autograd graphs) and update the parameters."""
        grad = getattr(gradients, "flat", None)
        if grad is None:
            pairs = zip(self._params, gradients, strict=True)
            grad = flatten([torch.zeros_like(p) if g is None else g for p, g in pairs])
        if self.ranks is not None:
            self.ranks.mean_(grad)
        norm, longest = torch.linalg.vector_norm(grad), self.max_grad_norm
        if longest is not None and (not norm.is_cpu or norm.item() > longest):  # reading the norm is free on a CPU
            grad.mul_((longest / (norm + 1e-6)).clamp_(max=1.0))
        self._move(grad)
        for part in self._projected:
            part.project_()
        return norm

    def _move(self, grad: Tensor) -> None:
        if self.kind in ("adam", "adamw"):
            steps = self.steps
            steps.add_(self._one)  # in place, since setting an attribute of a module takes longer than the addition
            tensors = self.flat, grad, self.mean, self.square
            params, grads, means, squares = [(x,) if grad.is_cpu else split_evenly(x) for x in tensors]
            state_steps = [steps] * len(params)
            if self.kind == "adamw":
                self.flat.mul_(1.0 - self.learning_rate * self.weight_decay)
            rates = {"lr": self.learning_rate, "eps": self.eps, "beta1": self.beta1}
            adam_step(params, grads, means, squares, state_steps=state_steps, **rates)
            return
        rate = self.learning_rate
        if self.kind == "radam":
            self.flat.sub_(rate * self._rectify(grad))
            return
        if self.kind != "sgd":
            square, inside = self.square, self.kind == "rmsprop_tf"
            square.lerp_(grad * grad, 1 - self.decay)
            root = (square + self.eps).sqrt_() if inside else square.sqrt().add_(self.eps)
        if isinstance(rate, Tensor):  # the kernels below take the rate by value
            grad, rate = grad * rate, 1.0
        if self.kind == "sgd":
            self.flat.add_(grad, alpha=-rate)
        else:
            self.flat.addcdiv_(grad, root, value=-rate)

    def _rectify(self, grad: Tensor) -> Tensor:
        """RAdam's step (Liu et al. 2020, arXiv:1908.03265): Adam's, shorter while the variance has few samples.

        torch's own reads the number of steps on the host, which a captured step must not.
        """
        beta, decay, steps = self.beta1, 0.999, self.steps.add_(self._one).double()
        self.mean.lerp_(grad, 1.0 - beta)
        self.square.lerp_(grad * grad, 1.0 - decay)
        most, left = 2.0 / (1.0 - decay) - 1.0, 1.0 - decay**steps
        samples = most - 2.0 * steps * (1.0 - left) / left
        rectified = (samples - 4) * (samples - 2) * most / ((most - 4) * (most - 2) * samples) * left
        scale = torch.where(samples > 5.0, rectified.sqrt() / self.square.sqrt().add_(self.eps), 1.0)
        return self.mean * scale / (1.0 - beta**steps)


class TargetNetwork:
    """A copy of `online` without gradients; `network` is the module to register and to call.

    Make it after the optimizers, which move the parameters of `online` into flat tensors: parameters that are
    adjacent there are adjacent in the copy too, and `copy_` and `polyak_` are one operation for all of them. Buffers (a
    normalizer's statistics, a support) are shared, not copied, so that they are always equal. This class is not a
    module: the learner's `self.target_network = target.network` puts the network into `state_dict` once.
    """

    def __init__(self, online: nn.Module) -> None:
        shared = {id(buffer): buffer for buffer in online.buffers()}
        self.online, self.network = online, copy.deepcopy(online, shared).requires_grad_(False)
        self._join()

    def _join(self) -> None:
        """Find adjacent parameters of the online network, and make them adjacent in the target."""
        self._pairs: list[tuple[Tensor, Tensor]] = []  # (target, online), each flat
        self._first: list[nn.Parameter] = []  # of the online side of each pair
        run: list[tuple[nn.Parameter, nn.Parameter]] = []
        for mine, theirs in zip(self.network.parameters(), self.online.parameters(), strict=True):
            if run and not _adjacent(run[-1][1], theirs):
                self._add(run)
                run = []
            run.append((mine, theirs))
        if run:
            self._add(run)

    def _add(self, run: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Give the target's side of one run of adjacent parameters a flat tensor like the online side's."""
        first, sizes = run[0][1], [theirs.numel() for _, theirs in run]
        alone = len(run) == 1
        online = first.detach() if alone else first.detach().as_strided((sum(sizes),), (1,))
        target = run[0][0].detach() if alone else join_parameters([mine for mine, _ in run])
        self._pairs.append((target, online))
        self._first.append(first)

    @torch.no_grad()
    def copy_(self) -> None:
        """Make the target equal to the online network."""
        self._follow()
        for target, online in self._pairs:
            target.copy_(online)

    @torch.no_grad()
    def polyak_(self, tau: float) -> None:
        """Move the target the share `tau` of the way to the online network."""
        self._follow()
        for target, online in self._pairs:
            target.lerp_(online, tau)

    def _follow(self) -> None:
        pairs = zip(self._first, self._pairs, strict=True)
        if any(first.data_ptr() != online.data_ptr() for first, (_, online) in pairs):
            self._join()  # the learner was copied, or an optimizer was made later


def _adjacent(before: nn.Parameter, after: nn.Parameter) -> bool:
    """Whether one parameter starts in memory where the other ends, as pieces of one flat tensor."""
    return (
        before.dtype == after.dtype
        and before.is_contiguous()
        and after.is_contiguous()
        and before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
        and before.storage_offset() + before.numel() == after.storage_offset()
    )


@torch.no_grad()
def move_support(support: Tensor, v_min: float, v_max: float, *heads: Any) -> None:
    """Spread `support` [K] from `v_min` to `v_max`, and change the last layers of the `heads` that predict on it.

    All of it happens in place, so captured steps and numpy policies see it. Predicted means stay the same within about
    half the distance of two new atoms.
    """
    wider = torch.linspace(v_min, v_max, len(support), device="cpu").to(support)
    if torch.equal(wider, support):
        return
    weights, offsets = carry_over(support, wider)
    for head in heads:
        head.combine_outputs(weights, offsets)
    support.copy_(wider)
