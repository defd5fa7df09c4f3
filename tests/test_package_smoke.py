"""What is in the package: presets that load, fit their algorithm and their environment from any folder; the wheel."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import pytest
import torch

import rl_training
from rl_training.config.params import read_params
from rl_training.config.train_config import list_presets, load_config
from rl_training.envs.factory import read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.errors import UserError
from rl_training.experiment.registry import get_algorithm_spec, list_algorithm_specs
from rl_training.run.build import open_session
from rl_training.run.learner import build_algorithm

ROOT = Path(__file__).resolve().parents[1]
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # building changes sys.argv
build_meta.build_wheel(out)
build_meta.build_sdist(out)
"""
USE = """
import rl_training
from rl_training.config.train_config import load_config
load_config("ppo/cartpole")
print(rl_training.__file__)
"""
WANTED = [
    "a2c/cartpole", "ppo/cartpole", "trpo/cartpole", "impala/cartpole", "appo/cartpole", "ppo/pendulum",
    "ppo/breakout_atari", "impala/breakout_atari",
]  # fmt: skip


def test_versions_agree() -> None:
    assert rl_training.__version__ == version("rl-training")


def test_the_package_is_typed() -> None:
    assert files("rl_training").joinpath("py.typed").is_file()


NOT_IN_DEV = {"rl_training", "setuptools", "tensorboard", "triton", "envpool"}  # installed anyway, or large
DISTRIBUTIONS = {"ale_py": "ale-py", "stable_baselines3": "stable-baselines3", "sb3_contrib": "sb3-contrib"}


def test_a_dev_install_skips_no_test_for_lack_of_a_package() -> None:
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed, left = set(), ["rl-training[dev]"]
    while left:
        name, _, others = left.pop().partition("[")
        installed.add(re.split(r"[<>=;]", name)[0])
        if others:
            left += [found for extra in others.rstrip("]").split(",") for found in extras[extra]]
    sources = "".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    needed = set(re.findall(r"importorskip\(\"(\w+)", sources)) - NOT_IN_DEV - set(sys.stdlib_module_names)
    assert {DISTRIBUTIONS.get(name, name) for name in needed} <= installed


# ---- presets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", WANTED)
def test_the_presets_of_the_contract_are_there(preset: str) -> None:
    assert preset in list_presets()


@pytest.mark.parametrize("preset", list_presets())
def test_a_preset_loads_and_its_parameters_fit_its_algorithm(preset: str) -> None:
    config = load_config(preset)
    assert config.algo == preset.split("/")[0]
    params = read_params(get_algorithm_spec(config.algo).params, config.algo_kwargs)
    assert set(config.algo_kwargs) - set(type(params).model_fields) <= {f"{name}_schedule" for name in params.schedules}
    assert config.device == config.threads == "auto"  # a preset is for any machine
    assert config.output_dir == "runs"


@pytest.mark.parametrize("preset", list_presets())
def test_the_environment_of_a_preset_can_be_made_and_is_supported(preset: str) -> None:
    config = load_config(preset)
    if config.env_id.startswith("ALE/"):
        pytest.importorskip("ale_py")
    try:
        spaces = probe_spaces(read_recipe(config.env_id, config.env_kwargs))
    except UserError as error:
        for package in ("mujoco", "minatar", "Box2D", "envpool"):
            if package.lower() in str(error).lower() and importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed")
        raise
    spec = get_algorithm_spec(config.algo)
    spec.check_support(spaces)
    params = read_params(spec.params, config.algo_kwargs)
    algorithm = build_algorithm(spec, params, spaces, seed=0, device="cpu")
    obs = torch.zeros(2, *spaces.obs_shape, dtype=getattr(torch, spaces.obs_dtype))
    assert algorithm.act(obs, deterministic=True).actions.shape == (2, *spaces.action_shape)


@pytest.mark.slow
@pytest.mark.parametrize("preset", list_presets())
def test_a_preset_starts(preset: str, tmp_path: Path) -> None:
    """With everything that a run does before its first step: environments, memory, the choice of device and threads."""
    config = load_config(preset).model_copy(update={"output_dir": str(tmp_path)})
    try:
        open_session(config).close()
    except UserError as error:
        if "pip install" in str(error):
            pytest.skip("its environment is not installed")
        raise


@pytest.mark.parametrize("preset", list_presets())
def test_a_limit_below_the_frame_skip_of_atari_counts_frames(preset: str) -> None:
    config = load_config(preset)
    recipe = read_recipe(config.env_id, config.env_kwargs)
    if recipe.wrappers.atari is not None:
        assert recipe.max_episode_steps in (None, 108_000)  # half an hour of play, which is the game's own limit


def test_every_algorithm_has_a_preset() -> None:
    own = {spec.name for spec in list_algorithm_specs() if spec.learner.__module__.startswith("rl_training.")}
    assert own <= {preset.split("/")[0] for preset in list_presets()}


@pytest.mark.parametrize(
    "name", ["ppo/cartpole", "configs/ppo/cartpole.yaml", "./configs/ppo/cartpole.yaml", "ppo/cartpole.yaml"]
)
def test_a_preset_is_found_from_any_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(name).algo == "ppo"


def test_a_file_of_that_name_comes_before_the_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "configs" / "ppo" / "cartpole.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("algo: ppo\nenv_id: Acrobot-v1\ntotal_timesteps: 7\n")
    assert load_config("configs/ppo/cartpole.yaml").env_id == "Acrobot-v1"
    assert load_config("ppo/cartpole").env_id == "CartPole-v1"


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'ppo/cartpole'"):
        load_config("configs/ppo/cartpol.yaml")


# ---- the distribution ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_wheel_and_sdist_hold_the_package_and_nothing_else(tmp_path: Path) -> None:
    """Built offline from a copy, so that the checkout stays clean; then the wheel's content works by itself."""
    pytest.importorskip("setuptools", "77")
    source, out = tmp_path / "source", tmp_path / "out"
    out.mkdir()
    noise = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=noise)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "configs").symlink_to("src/rl_training/assets/configs")  # as in a checkout
    (source / "tests").mkdir()
    (source / "tests" / "test_package.py").touch()
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=source, capture_output=True, text=True, timeout=120, check=False
    )
    assert built.returncode == 0, built.stderr[-2000:]
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    package = {
        str(path.relative_to(source / "src")) for path in (source / "src" / "rl_training").rglob("*")
        if path.suffix in {".py", ".pyi", ".yaml", ".npz", ".typed", ".html", ".md"} or path.name == "py.typed"
    }  # fmt: skip
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert names == package
        archive.extractall(tmp_path / "installed")
    with tarfile.open(sdist) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {f"src/{name}" for name in package} | {"LICENSE", "README.md", "pyproject.toml"} <= inside
    assert not any(name.startswith(("configs", "runs", "tests")) for name in inside)
    train = ["-m", "rl_training", "train", "--config", "bc/cartpole", "--total-timesteps", "5", "--eval-episodes", "1"]
    for words in (["-c", USE], train):  # the preset and the data that it reads are the wheel's own
        ran = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr[-2000:]
        assert ran.stdout.startswith(str(tmp_path / "installed")) or words is train
    assert list((tmp_path / "runs").glob("*/checkpoints/latest.ckpt"))
