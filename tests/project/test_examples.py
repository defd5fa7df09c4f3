"""The examples that teach, each with a small budget."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from rl_training.record.metrics_file import tagged_numbers

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL: dict[str, dict[str, int]] = {
    "own_environment": {"total_timesteps": 600},
    "callback": {"total_timesteps": 4_000},
    "device_environment": {"total_timesteps": 2_048, "num_envs": 16},
    "own_robot": {"total_timesteps": 2_048, "num_envs": 16},
    "simulator": {"total_timesteps": 2_048, "num_envs": 32},
    "custom_network": {"total_timesteps": 120, "learning_starts": 100},
    "offline_to_online": {"first_timesteps": 300, "more_timesteps": 260},
    "deployment": {"total_timesteps": 1_000},
    "workers": {"total_timesteps": 600},
    "optuna_study": {"trials": 2, "total_timesteps": 2_000},
}


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of that name, run in an empty folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    return importlib.import_module(request.param)


SLOW = dict.fromkeys(("offline_to_online", "deployment", "workers"), pytest.mark.slow)
CASES = [pytest.param(name, budget, id=name, marks=SLOW.get(name, ())) for name, budget in SMALL.items()]


@pytest.mark.parametrize(("example", "budget"), CASES, indirect=["example"])
def test_an_example_runs(example: Any, budget: dict[str, int]) -> None:
    assert example.main(**budget) is not None


@pytest.mark.parametrize(
    ("page", "example"),
    [
        ("device_environments", "device_environment"), ("physics", "own_robot"), ("simulators", "simulator"),
        ("tuning", "optuna_study"), ("tuning", "sweep"),
    ],
)
def test_the_page_shows_the_example_as_it_is(page: str, example: str) -> None:
    text = (EXAMPLES.parent / "docs" / f"{page}.md").read_text()
    assert (EXAMPLES / f"{example}.py").read_text() in text


def test_a_trial_of_the_sweep_takes_what_an_agent_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    import sweep
    import yaml

    asked = yaml.safe_load((EXAMPLES / "sweep.yaml").read_text())
    words = [f"--{name}={limits['min']}" for name, limits in asked["parameters"].items()]
    assert sweep.main(words, total_timesteps=2_000, loggers=()) > 0
    (config,) = tmp_path.glob("runs/*/config.yaml")
    kwargs = yaml.safe_load(config.read_text())["algo_kwargs"]
    assert {name: kwargs[name] for name in asked["parameters"]} == {"learning_rate": 0.0001, "ent_coef": 0.0}
    assert asked["metric"]["name"] in dict(tagged_numbers("eval", {"eval_return_mean": 1.0}))
    assert (EXAMPLES / "sweep.yaml").read_text() in (EXAMPLES.parent / "docs" / "tuning.md").read_text()
