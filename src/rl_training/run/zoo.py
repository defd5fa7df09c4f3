"""The zoo: a trained policy for each of many presets, as files that run no code when they are loaded, with a card."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path

from pydantic import Field

from rl_training.errors import UserError, did_you_mean
from rl_training.run.folder import read_json
from rl_training.safe_files import output_written
from rl_training.validation import StrictModel, validate

SUFFIX = ".policy"


class Card(StrictModel):
    """What a policy of the zoo reaches, and how it was made."""

    preset: str = Field(description="The preset that it was trained with.")
    algo: str = Field(description="Its algorithm.")
    env_id: str = Field(description="Its environment.")
    seed: int = Field(description="The seed of the run.")
    steps: int = Field(description="Environment steps of the run.")
    returns: list[float] = Field(description="Returns of the episodes that were played with this file.")
    episode_seed: int = Field(description="The seed of these episodes, which chose nothing.")
    command: str = Field(description="The command that trains it again.")
    commit: str = Field(description="The commit of rl-training that trained it.")
    machine: str = Field(description="Where it was trained.")
    train_seconds: float = Field(description="Wall-clock seconds of training.")
    weights: str = Field(description="The type of its weights: float32 or float16.")
    sha256: str = Field(description="The checksum of the file.")


def zoo_folder() -> Path:
    """The folder of the packaged policies."""
    return Path(str(files("rl_training"))) / "assets" / "zoo"


def list_zoo() -> list[str]:
    """The names of the packaged policies, such as `ppo/halfcheetah_gpu`."""
    folder = zoo_folder()
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob(f"*/*{SUFFIX}"))


def find_policy(name: str) -> Path:
    """The file of a packaged policy."""
    if name not in (known := list_zoo()):
        raise UserError(f"the zoo has no policy {name!r}; {did_you_mean(name, known)}")
    return zoo_folder() / f"{name}{SUFFIX}"


def read_card(name: str) -> Card:
    """The card of a packaged policy."""
    path = find_policy(name).with_suffix(".json")
    return validate(Card, read_json(path), str(path))


def get_policy(name: str, output: Path) -> Path:
    """Copy a packaged policy to `output`, a file or a folder."""
    source = find_policy(name)
    target = output / source.name if output.is_dir() else output
    with output_written(target, "output"):
        shutil.copyfile(source, target)
    return target
