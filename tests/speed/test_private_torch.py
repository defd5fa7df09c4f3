"""Private names of torch are in one file, and each still does what that file says."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "rl_training"
HOME = PACKAGE / "speed" / "private_torch.py"
# Modules with an underscore from which torch's own documentation imports.
DOCUMENTED = {
    "torch.utils._pytree": ("keystr", "tree_flatten", "tree_flatten_with_path", "tree_map", "tree_unflatten"),
    "torch.utils._python_dispatch": ("TorchDispatchMode",),
}
CHANGED = f"torch {torch.__version__} has changed a private name that rl_training uses: correct {{}} in {HOME.name}"


def private_names(path: Path) -> Iterator[str]:
    """Dotted names of torch with a part that starts with one underscore, and private attributes of tensors."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            found = [ast.unparse(node)]
        elif isinstance(node, ast.Attribute) and node.attr in ("_cdata", "_dynamo_marked_constant"):
            found = [node.attr]
        else:
            continue
        for name in found:
            parts = name.split(".")
            if any(part.startswith("_") and not part.startswith("__") for part in parts):
                yield name


def test_private_names_of_torch_are_in_one_file() -> None:
    assert "torch._fused_adam_" in set(private_names(HOME))
    for path in PACKAGE.rglob("*.py"):
        odd = {name for name in private_names(path) if name.rpartition(".")[0] not in DOCUMENTED}
        assert path == HOME or not odd, f"{path} uses {odd}: put it into {HOME.name}, with a test here"


@pytest.mark.parametrize("module", DOCUMENTED)
def test_documented_modules_have_their_names(module: str) -> None:
    assert not [name for name in DOCUMENTED[module] if not hasattr(importlib.import_module(module), name)]


@pytest.fixture(scope="module")
def private() -> Any:
    try:
        return importlib.import_module("rl_training.speed.private_torch")
    except ImportError as error:
        pytest.fail(CHANGED.format(error))


def check_differentiate(private: Any) -> None:
    x, unused = torch.tensor([1.0, 2.0], requires_grad=True), torch.ones(1, requires_grad=True)
    found = private.differentiate((x.square(),), (torch.tensor([1.0, 10.0]),), inputs=(x, unused))
    assert found[0].tolist() == [2.0, 40.0]
    assert found[1] is None
    assert x.grad is None


def check_concatenate(private: Any) -> None:
    assert private.concatenate([torch.arange(4).view(2, 2).t(), torch.tensor(7)]).tolist() == [0, 2, 1, 3, 7]


def check_copy_all(private: Any) -> None:
    targets = [torch.zeros(2), torch.zeros(1)]
    private.copy_all(targets, [torch.ones(2), torch.full((1,), 3.0)])
    assert [target.tolist() for target in targets] == [[1.0, 1.0], [3.0]]


def check_adam_step(private: Any) -> None:
    mine, mean, square, steps = torch.ones(3), torch.zeros(3), torch.zeros(3), torch.zeros(())
    theirs = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.Adam([theirs], lr=0.1, eps=1e-5)
    for gradient in torch.tensor([[1.0, -2.0, 0.0], [0.5, 3.0, 1e-4]]):
        steps += 1
        private.adam_step([mine], [gradient.clone()], [mean], [square], state_steps=[steps], lr=0.1, eps=1e-5)
        theirs.grad = gradient.clone()
        adam.step()
    torch.testing.assert_close(mine, theirs.detach())


def check_holder_counter(private: Any) -> None:
    one = torch.zeros(4)
    count = private.holder_counter(one)
    alone = count()
    view = one[1:]
    assert count() == alone + 1
    del view
    assert count() == alone


def check_record_graph(private: Any) -> None:
    x = torch.ones(1, requires_grad=True)
    before = torch.is_grad_enabled()
    private.record_graph(False)
    try:
        assert not (2 * x).requires_grad
    finally:
        private.record_graph(before)
    assert (2 * x).requires_grad


def check_constant_in_graphs(private: Any) -> None:
    calls = []

    @private.constant_in_graphs
    def factor() -> int:
        calls.append(1)  # a side effect that `torch.compile` would otherwise see
        return 3

    compiled = torch.compile(lambda x: x * factor(), backend="eager", fullgraph=True)
    assert [compiled(torch.ones(1)).item() for _ in range(3)] == [3.0] * 3
    assert len(calls) == 1


@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_a_private_name_does_what_it_did(name: str, private: Any) -> None:
    try:
        globals()[name](private)
    except Exception as error:
        raise AssertionError(CHANGED.format(f"{name.removeprefix('check_')!r} ({error})")) from error
