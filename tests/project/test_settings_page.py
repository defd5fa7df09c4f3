"""The page of all settings: nothing that can be set is missing, and the API page shows nothing private."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from rl_training.cli.screen import BY_SIGNAL, FAILED, WRONG_INPUT
from rl_training.config.params import EarlyStopping, Params, Schedule
from rl_training.config.train_config import RayResources, TrainConfig
from rl_training.envs.factory import SimulatorSettings
from rl_training.envs.wrappers import AtariOptions, PixelOptions, WrapperOptions

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import generate_docs  # noqa: E402
import settings_page  # noqa: E402

MODELS = (
    TrainConfig, RayResources, WrapperOptions, AtariOptions, PixelOptions, SimulatorSettings, Params, EarlyStopping,
    Schedule,
)  # fmt: skip


@pytest.fixture(scope="module")
def page() -> str:
    return settings_page.render_settings(generate_docs.table, generate_docs.describe_range)


def rows(page: str, title: str) -> dict[str, list[str]]:
    """The cells after the first one, by the first, of the table under a title."""
    section = page.partition(f"\n{title}\n")[2].partition("\n#")[0]
    found = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    return {cells[0].strip("`"): cells[1:] for cells in found}


def test_every_field_of_every_model_is_there(page: str) -> None:
    named = set(re.findall(r"^\| `(\w+)`", page, re.M))
    for model in MODELS:
        assert set(model.model_fields) - {"schedules"} <= named, model.__name__
    fields = rows(page, "## Fields of a config")
    assert fields.keys() == TrainConfig.model_fields.keys()
    assert fields["num_envs"] == ["`1`", "whole number from 1 to 65,536", "Environments stepped together."]
    assert fields["algo"][0] == "required"
    assert fields["algo_kwargs"][:2] == ["`{}`", "mapping"]


def test_every_extra_is_explained(page: str) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    extras = set(re.findall(r"^([\w-]+) = \[", text.partition("\n[")[0], re.M))
    assert rows(page, "## Extras").keys() == extras
    with pytest.raises(ValueError, match="name different extras: pandas"):
        settings_page.read_extras(extras - {"pandas"})


def test_the_exit_codes_are_those_of_the_commands(page: str) -> None:
    assert list(rows(page, "## Exit codes")) == [
        str(code) for code in (0, FAILED, WRONG_INPUT, BY_SIGNAL + signal.SIGINT, BY_SIGNAL + signal.SIGTERM)
    ]


def test_every_environment_variable_that_the_code_reads_for_users_is_there(page: str) -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    read = set(re.findall(r'os\.environ(?:\.get\(|\[|\.setdefault\()\s*"(\w+)"', source))
    other = {"TERM", "CXX", "DISPLAY", "WAYLAND_DISPLAY", "TORCHELASTIC_RUN_ID"}  # of the system and of torchrun
    assert read - other <= set(re.findall(r"`([A-Z_]+)`", page.partition("## Environment variables")[2]))


def test_the_api_page_shows_nothing_private() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = {name for names in re.findall(r"members: \[(.*?)\]", text) for name in names.split(", ")}
    assert listed
    assert not [name for name in listed if name.startswith("_")]
    blocks = re.split(r"^::: ", text, flags=re.M)[1:]
    models = [block for block in blocks if block.startswith("rl_training.config")]  # pydantic gives them many more
    assert models
    assert all("members:" in block for block in models)
