"""Algorithms of other packages: a plugin that fails is named and left out, and our names can be imported in one."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rl_training
from rl_training.cli.main import app
from rl_training.config import spec
from rl_training.errors import UserError
from rl_training.experiment.registry import get_algorithm_spec, list_algorithm_specs

Install = Callable[..., None]
GOOD = """
from dataclasses import replace
from rl_training import PPO, PPOAlgorithm
from rl_training.experiment.registry import get_algorithm_spec

class MyPPO(PPOAlgorithm):
    pass

assert PPO.algo == "ppo"
SPECS = [replace(get_algorithm_spec("ppo"), name="my_ppo", class_name="MyPPO", learner=MyPPO)]
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution with one module and its entry point on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(spec, "_plugins", None)

    def put(name: str, source: str, value: str = "") -> None:
        module = f"{name}_plugin"
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[rl_training.algorithms]\n{name} = {value or module + ':SPECS'}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)
        importlib.invalidate_caches()

    return put


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


BROKEN = {
    "import no_such_module": r"ModuleNotFoundError: No module named 'no_such_module'",
    "1 / 0": r"ZeroDivisionError: division by zero",
    "raise SystemExit(3)": r"SystemExit: it called sys.exit\(3\)",
    "": r"AttributeError: module 'broken_plugin' has no attribute 'SPECS'",
    "SPECS = [7]": r"TypeError: it names 7, which is not an AlgorithmSpec",
    "from rl_training.experiment.registry import get_algorithm_spec as get; SPECS = get('ppo')":
        r"ValueError: the name 'ppo' is taken by an algorithm of rl-training",
}  # fmt: skip


@pytest.mark.parametrize("source", BROKEN)
def test_a_plugin_that_fails_is_named_and_left_out(install: Install, source: str) -> None:
    install("broken", source)
    install("my_ppo", GOOD)
    reason = rf"the plugin broken = broken_plugin:SPECS cannot be loaded \({BROKEN[source]}\)"
    with pytest.warns(UserWarning, match=rf"^{reason} and is left out; fix or uninstall it\.$") as caught:
        names = [found.name for found in list_algorithm_specs()]
    assert len(caught) == 1
    assert (names.count("ppo"), "my_ppo" in names, "broken" in names) == (1, True, False)
    with pytest.raises(UserError, match=rf"^algo is 'broken', but {reason}; fix the plugin or choose another"):
        get_algorithm_spec("broken")
    with pytest.raises(UserError, match="'other' is not a registered algorithm"):
        get_algorithm_spec("other")


def test_commands_work_next_to_a_plugin_that_fails(install: Install) -> None:
    install("broken", "import no_such_module")
    tiny = ["--total-timesteps", "64", "--num-envs", "1", "--eval-episodes", "0", "--set", "num_steps=32"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # our own algorithms do not even look at plugins
        trained = invoke("train", "--algo", "ppo", "--env", "CartPole-v1", *tiny)
    assert trained.exit_code == 0, trained.output
    with pytest.warns(UserWarning, match="the plugin broken = broken_plugin:SPECS cannot be loaded"):
        listed = invoke("list")
    assert listed.exit_code == 0, listed.output
    assert "ppo" in listed.stdout
    refused = invoke("train", "--algo", "broken", "--env", "CartPole-v1", *tiny)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "algo is 'broken', but the plugin broken = broken_plugin:SPECS cannot be loaded (Module" in refused.stderr


@pytest.mark.parametrize("first", ["list", "get", "class", "plugin"])
def test_a_plugin_may_import_our_names_however_it_is_loaded_first(install: Install, first: str) -> None:
    install("my_ppo", GOOD)
    start = {
        "list": list_algorithm_specs, "get": lambda: get_algorithm_spec("my_ppo"),
        "class": lambda: rl_training.MyPPO, "plugin": lambda: importlib.import_module("my_ppo_plugin"),
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start[first]()
        assert "my_ppo" in [found.name for found in list_algorithm_specs()]
    assert rl_training.MyPPOAlgorithm is sys.modules["my_ppo_plugin"].MyPPO
    assert rl_training.MyPPO.algo == "my_ppo"


def test_a_plugin_that_lists_algorithms_while_it_is_loaded_sees_ours(install: Install) -> None:
    lists = "from rl_training.experiment.registry import list_algorithm_specs\n"
    install("my_ppo", f"{GOOD}{lists}KNOWN = [spec.name for spec in list_algorithm_specs()]\n")
    assert "my_ppo" in [found.name for found in list_algorithm_specs()]
    known = sys.modules["my_ppo_plugin"].KNOWN
    assert ("ppo" in known, "my_ppo" in known) == (True, False)
