"""Who may import whom (docs/architecture.md): read from the source, for every import in it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "rl_training"
ANYWHERE = {"errors", "validation", "play", "safe_files"}
# Folder -> the folders that it may import, lowest first: each imports only folders above it in this table.
ROOMS = {
    "ops": "",
    "speed": "ops",
    "models": "ops speed",
    "algorithms": "ops speed",
    "envs": "",
    "data": "algorithms envs",
    "collect": "speed algorithms envs data",
    "config": "models algorithms envs data collect",
    "record": "",
    "run": "speed algorithms envs data collect config record",
    "runtime": "models algorithms envs data config run",
    "experiment": "envs config run",
    "api": "envs config record run experiment",
    "tools": "algorithms envs data collect config record run",
    "cli": "envs data config record run experiment tools",
}
ALGORITHM_BASES = {"base", "actor_critic", "q_learning", "q_sequences", "critic_heads", "ops"}  # shared by learners


def is_inside(module: str, parent: str) -> bool:
    """Whether `module` is `parent` or below it."""
    return module == parent or module.startswith(f"{parent}.")


def module_name(path: Path) -> str:
    """The module of a file, without `rl_training.`; the package itself is the empty name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path) -> Iterator[str]:
    """Every module that a file imports anywhere, functions included; type-checking-only imports too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports in this package are absolute"
            assert node.module is not None
            yield node.module
            if node.module.startswith("rl_training"):
                yield from submodules(node.module, [alias.name for alias in node.names])


def submodules(module: str, names: list[str]) -> Iterator[str]:
    """The names of `from module import names` that are modules themselves."""
    folder = PACKAGE.parent.joinpath(*module.split("."))
    for name in names:
        if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file():
            yield f"{module}.{name}"


def own_imports(path: Path) -> set[str]:
    """Modules of this package that a file imports, without `rl_training.`."""
    names = {name for name in imported_names(path) if is_inside(name, "rl_training")}
    return {name.removeprefix("rl_training").removeprefix(".") for name in names}


def files_of(*parts: str) -> list[Path]:
    """Source files of subpackages or modules of this package."""
    found = [p for p in sorted(PACKAGE.rglob("*.py")) if any(is_inside(module_name(p), part) for part in parts)]
    assert found, f"no files for {parts}"
    return found


def violations(files: list[Path], *, allowed: set[str] | None = None, forbidden: set[str] | None = None) -> list[str]:
    """`module imports module` for each import outside `allowed` or inside `forbidden`."""
    found = []
    for path in files:
        for name in sorted(own_imports(path)):
            outside = allowed is not None and not any(is_inside(name, part) for part in allowed)
            inside = forbidden is not None and any(is_inside(name, part) for part in forbidden)
            if outside or inside:
                found.append(f"{module_name(path)} imports {name or 'rl_training'}")
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_folder_imports_only_the_folders_that_the_table_names(room: str) -> None:
    assert violations(files_of(room), allowed={room, "", *ROOMS[room].split(), *ANYWHERE}) == []


def test_no_folder_imports_one_that_comes_later_so_there_is_no_cycle() -> None:
    order = list(ROOMS)
    for room, allowed in ROOMS.items():
        assert all(order.index(other) < order.index(room) for other in allowed.split()), room


@pytest.mark.parametrize("module", sorted(ANYWHERE))
def test_what_everyone_imports_imports_next_to_nothing(module: str) -> None:
    assert violations(files_of(module), allowed={"errors"} - {module}) == []


def test_ops_are_pure_functions_of_tensors() -> None:
    assert violations(files_of("ops"), allowed={"ops", "errors"}) == []
    foreign = {name.split(".")[0] for path in files_of("ops") for name in imported_names(path)}
    assert foreign <= {"__future__", "torch", "collections", "math", "typing", "rl_training"}


def learner_files() -> list[Path]:
    """One file per algorithm."""
    shared = {f"{name}.py" for name in ALGORITHM_BASES} | {"__init__.py"}
    return [path for path in sorted((PACKAGE / "algorithms").glob("*.py")) if path.name not in shared]


@pytest.mark.parametrize("path", learner_files(), ids=lambda path: path.stem)
def test_an_algorithm_imports_torch_its_base_and_the_one_it_extends(path: Path) -> None:
    learners = {f"algorithms.{other.stem}" for other in learner_files()}
    bases = {f"algorithms.{name}" for name in ALGORITHM_BASES} | {"ops", "speed"}
    assert violations([path], allowed={*bases, *learners, *ANYWHERE}) == []
    assert len({name for name in own_imports(path) if name in learners}) <= 1
    standard = set(sys.stdlib_module_names)
    foreign = {name.split(".")[0] for name in imported_names(path)} - standard
    assert foreign <= {"torch", "numpy", "rl_training"}


TRAINERS = {module_name(path) for path in (PACKAGE / "runtime").glob("*_trainer.py")}
EXTENDED = {"runtime.gail_trainer": {"runtime.ppo_trainer"}}  # a trainer that extends another


def test_the_runtime_has_only_trainers_and_the_workflows_of_scripts() -> None:
    assert {module_name(path) for path in files_of("runtime")} == {"runtime", "runtime.workflows", *TRAINERS}


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
def test_trainers_know_no_other_trainer(trainer: str) -> None:
    others = TRAINERS - {trainer} - EXTENDED.get(trainer, set())
    assert violations(files_of(trainer), forbidden=others) == []


def test_every_folder_has_a_rule() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(ROOMS)


@pytest.mark.parametrize("statement", ["import rl_training", "import rl_training.cli.main"])
def test_importing_the_package_or_its_command_line_does_not_import_torch(statement: str) -> None:
    code = f"import sys; {statement}; print([name for name in ('torch', 'gymnasium', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_wrong_import_would_be_found(tmp_path: Path) -> None:
    source = "from rl_training import envs\nfrom rl_training.data import replay\nimport torch\n"
    path = tmp_path / "wrong.py"
    path.write_text(source)
    assert own_imports(path) == {"", "envs", "data", "data.replay"}


def test_a_first_update_imports_neither_sympy_nor_the_compiler_of_torch() -> None:
    """`torch.autograd.grad` with gradients of outputs does, and `torch.compiler.disable`: seconds of every start."""
    code = """
import sys, torch
import rl_training.run.workflows
from rl_training.algorithms.ppo import PPO
from rl_training.models.mlp_actor_critic import MLPActorCritic
for kind in ("discrete", "continuous"):
    policy = MLPActorCritic(obs_dim=3, action_dim=2, activation="elu", action_kind=kind)
    actions = torch.zeros(4, dtype=torch.long) if kind == "discrete" else torch.zeros(4, 2)
    rows = {"obs": torch.randn(4, 3), "actions": actions}
    PPO(policy=policy).minibatch_step(rows | dict.fromkeys(("logprobs", "advantages", "returns"), torch.randn(4)))
print([name for name in ("sympy", "torch._dynamo") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
