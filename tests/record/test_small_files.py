"""Small files, large costs: what a file claims is compared with what it holds, before time or memory is spent on it."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from limits import limited
from resume_cases import SPECS, tiny
from rl_training.cli.checkpoint import read_values
from rl_training.config.params import read_params
from rl_training.config.train_config import load_config, parse_yaml
from rl_training.data import TransitionDataset, load_transition_dataset
from rl_training.data.loading import read_minari
from rl_training.envs.factory import read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.errors import UserError
from rl_training.record.checkpoints import load_checkpoint, save_checkpoint
from rl_training.run.learner import SizeLimit, build_algorithm, count_numbers, load_policy
from rl_training.run.workflows import resume_training, train

HUGE = 60_000_000
ARRAYS = ("obs", "actions", "rewards", "next_obs", "terminated", "truncated")
FACTORS = {"type": "MultiDiscrete", "nvec": np.array([HUGE] * 9), "start": np.zeros(9, int), "dtype": "int64"}
SPACES: dict[str, tuple[str, dict[str, Any]]] = {
    "Discrete actions": ("raw_action", {"type": "Discrete", "n": HUGE, "start": 0, "dtype": "int64"}),
    "Discrete observations": ("raw_observation", {"type": "Discrete", "n": HUGE, "start": 0, "dtype": "int64"}),
    "MultiDiscrete actions": ("raw_action", FACTORS),
    "MultiDiscrete observations": ("raw_observation", FACTORS),
    "MultiBinary actions": ("raw_action", {"type": "MultiBinary", "n": 100 * HUGE}),
    "MultiBinary observations": ("raw_observation", {"type": "MultiBinary", "n": [HUGE, HUGE]}),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: train(tiny(name, folder), console=False).checkpoint_path for name in ("ppo", "sac")}


def refuse_quickly(path: Path, match: str, megabytes: int = 300) -> None:
    for use in (load_policy, lambda path: resume_training(path, total_timesteps=500, console=False)):
        with limited(seconds=20, megabytes=megabytes), pytest.raises(UserError, match=match):
            use(path)  # type: ignore[operator]


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_a_config_of_huge_layers_is_compared_with_the_stored_arrays(
    algo: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    tree = load_checkpoint(checkpoints[algo])
    tree["config"]["algo_kwargs"]["hidden_sizes"] = [16384] * 16
    path = save_checkpoint(tmp_path / "huge.ckpt", tree)
    refuse_quickly(path, "does not fit its own config: it holds [0-9,]+ numbers")


@pytest.mark.parametrize("name", SPACES)
def test_huge_spaces_are_compared_with_the_stored_arrays(
    name: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    field, space = SPACES[name]
    tree = load_checkpoint(checkpoints["ppo"])
    stored = tree["spaces"]
    stored[field] = space
    sizes = {"Discrete": [HUGE], "MultiDiscrete": [HUGE] * 9, "MultiBinary": stored["action_sizes"]}[space["type"]]
    kinds = {"Discrete": "discrete", "MultiDiscrete": "multi_discrete", "MultiBinary": "multi_binary"}
    if field == "raw_action":
        stored.update(action_sizes=sizes, action_kind=kinds[space["type"]])
    else:
        width = {"Discrete": HUGE, "MultiDiscrete": 9 * HUGE, "MultiBinary": HUGE * HUGE}[space["type"]]
        stored.update(obs_shape=[width])
    path = save_checkpoint(tmp_path / "huge.ckpt", tree)
    with limited(seconds=20, megabytes=300), pytest.raises(UserError, match=r"does not fit its own|is not supp"):
        load_policy(path)


@pytest.mark.parametrize("algo", SPECS)
def test_every_algorithm_makes_no_more_numbers_than_it_stores(
    algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its own checkpoints would be refused."""
    monkeypatch.setattr(SizeLimit, "SPARE", 0)
    config, spec = tiny(algo, tmp_path, kwargs={"hidden_sizes": [128, 128]}), SPECS[algo]
    params, spaces = read_params(spec.params, config.algo_kwargs), probe_spaces(read_recipe(config.env_id, {}))
    state = build_algorithm(spec, params, spaces, seed=0, device="cpu").state_dict()
    build_algorithm(spec, params, spaces, seed=0, device="cpu", held=count_numbers(state))
    with pytest.raises(UserError, match="the networks that its config and spaces describe have more"):
        build_algorithm(spec, params, spaces, seed=0, device="cpu", held=0)


# ---- configs --------------------------------------------------------------------------------------------------------


def merges(levels: int) -> str:
    """Each level merges the one before it nine times."""
    lines = ["a0: &a0 {x: 1, y: 2}"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 9)}], z{level}: 1}}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (merges(9), r"cannot be read as YAML \(line \d+\): it holds more than 10000 values"),
        (merges(9).replace("<<: ", "parts: "), "more than 10000 values"),
        ("a: &a [*a]", "more than 10000 values|cannot be read|recursive"),
        ("env_kwargs: &a {b: *a}", "more than 10000 values|recursive"),
        ("seed: 1\nalgo: ppo\nseed: 2", r"\(line 1\): the key 'seed' occurs twice"),
        ("env_kwargs: {a: 1, a: 2}", "the key 'a' occurs twice"),
        ("a: 1\n" * 50_000, "larger than 200,000 bytes"),
    ],
)
def test_a_short_config_stands_for_no_more_than_a_stated_number_of_values(
    text: str, match: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with limited(seconds=5, megabytes=100), pytest.raises(UserError, match=match):
        load_config(path)


def test_aliases_and_merges_still_work() -> None:
    text = "base: &base {a: 1, b: 2}\nmine:\n  <<: *base\n  b: 3\nagain: *base"
    assert parse_yaml(text) == yaml.safe_load(text)
    assert parse_yaml("") is None


# ---- data sets and observations -------------------------------------------------------------------------------------


def npy_header(shape: tuple[int, ...], descr: str = "<f4") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


@pytest.fixture(scope="module")
def bomb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An npz whose arrays are zeros, 300 MB: a few thousandths of that in the file."""
    path = tmp_path_factory.mktemp("bomb") / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in ARRAYS:
            size = 300_000_000 if name == "obs" else 4
            archive.writestr(f"{name}.npy", npy_header((size // 4,)) + bytes(size))
    assert path.stat().st_size < 2_000_000
    return path


def test_a_small_npz_that_expands_is_refused_before_it_is_read(bomb: Path) -> None:
    with limited(seconds=5, megabytes=100), pytest.raises(UserError, match="MB and would expand to 300 MB; more than"):
        TransitionDataset.from_npz(bomb)


def test_an_npz_whose_header_claims_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "claims.npz", "w") as archive:
        for name in ARRAYS:
            archive.writestr(f"{name}.npy", npy_header((10**12,)) + bytes(8))
    with limited(seconds=5, megabytes=100), pytest.raises(UserError, match="would expand to"):
        TransitionDataset.from_npz(tmp_path / "claims.npz")


def test_an_observation_file_that_claims_what_is_not_there_is_refused(tmp_path: Path, bomb: Path) -> None:
    (tmp_path / "x.npy").write_bytes(npy_header((10**12,)) + bytes(8))
    (tmp_path / "zip.npy").symlink_to(bomb)
    for name in ("x.npy", "zip.npy"):
        with limited(seconds=5, megabytes=100), pytest.raises(UserError, match=r"is not a \.npy file of numbers"):
            read_values("--obs", str(tmp_path / name), "")
    np.save(tmp_path / "right.npy", np.arange(4.0))
    assert read_values("--obs", str(tmp_path / "right.npy"), "").tolist() == [0.0, 1.0, 2.0, 3.0]


# ---- where a resumed run writes -------------------------------------------------------------------------------------


def test_a_checkpoint_does_not_say_where_its_resumed_run_writes(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tree = load_checkpoint(checkpoints["ppo"])
    tree["config"]["output_dir"] = str(tmp_path / "of the checkpoint")
    path = save_checkpoint(tmp_path / "downloads" / "policy.ckpt", tree)
    result = resume_training(path, total_timesteps=160, console=False)
    assert result.run_dir.resolve().parent == tmp_path / "runs"
    assert load_config(result.run_dir / "config.yaml").output_dir == "runs"
    chosen = resume_training(path, total_timesteps=160, output_dir=tmp_path / "chosen", console=False)
    assert chosen.run_dir.parent == tmp_path / "chosen"
    # a branch of a run lies next to the run
    tree["run"]["step"] = 64
    branch = save_checkpoint(result.run_dir / "checkpoints" / "step_64.ckpt", tree)
    assert resume_training(branch, total_timesteps=160, console=False).run_dir.parent == result.run_dir.resolve().parent
    assert not (tmp_path / "of the checkpoint").exists()


# ---- Minari ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def minari_folder(tmp_path: Path) -> Path:
    pytest.importorskip("minari")
    pytest.importorskip("h5py")
    from rl_training.data.loading import write_minari

    dataset = load_transition_dataset("random", env_id="CartPole-v1", size=60)
    write_minari(dataset, "cart/pole-v0", tmp_path, env_id="CartPole-v1")
    return tmp_path


def damage(folder: Path, name: str) -> None:
    import h5py

    data = folder / "cart" / "pole-v0" / "data"
    file, metadata = data / "main_data.hdf5", data / "metadata.json"
    described = json.loads(metadata.read_text())
    if name == "no data file":
        file.unlink()
    elif name == "cut short":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif name == "empty":
        file.write_bytes(b"")
    elif name == "not HDF5":
        file.write_bytes(b"hello" * 100)
    elif name == "no metadata":
        metadata.unlink()
    elif name == "metadata is not JSON":
        metadata.write_text("{")
    elif name == "metadata is a list":
        metadata.write_text("[]")
    elif name.startswith("metadata without"):
        described.pop(name.split()[-1])
        metadata.write_text(json.dumps(described))
    elif name == "too many episodes":
        metadata.write_text(json.dumps({**described, "total_episodes": 10**9}))
    elif name == "huge shape":
        space = {"type": "Box", "dtype": "float32", "shape": [10**9], "low": 0.0, "high": 1.0}
        metadata.write_text(json.dumps({**described, "observation_space": json.dumps(space)}))
    elif name == "huge Discrete":
        space = {"type": "Discrete", "dtype": "int64", "start": 0, "n": 10**9}
        metadata.write_text(json.dumps({**described, "observation_space": json.dumps(space)}))
    elif name.startswith("a pipe for"):
        data.joinpath(name.split()[-1]).unlink()
        os.mkfifo(data / name.split()[-1])
    elif name == "another format":
        metadata.write_text(json.dumps({**described, "data_format": "nonsense"}))
    else:
        with h5py.File(file, "a") as opened:
            if name == "no groups":
                opened.clear()
            elif name == "no rewards":
                del opened["episode_0/rewards"]
            elif name == "words for rewards":
                del opened["episode_0/rewards"]
                opened["episode_0/rewards"] = [b"a", b"b"]
            elif name == "numbers for observations":
                del opened["episode_0/observations"]
                opened["episode_0/observations"] = 3.0
            elif name == "huge claim":
                del opened["episode_0/rewards"]
                opened.create_dataset("episode_0/rewards", (10**12,), "f4", chunks=(1024,))
            elif name in ("a link to another file", "values in another file", "a view of another file"):
                os.mkfifo(pipe := data.parent / "pipe")
                length = len(opened["episode_0/rewards"])
                del opened["episode_0/rewards"]
                if name == "a link to another file":
                    opened["episode_0/rewards"] = h5py.ExternalLink(str(pipe), "rewards")
                elif name == "values in another file":
                    opened.create_dataset("episode_0/rewards", (length,), "f4", external=[(str(pipe), 0, 4 * length)])
                else:
                    view = h5py.VirtualLayout((length,), "f4")
                    view[:] = h5py.VirtualSource(str(pipe), "rewards", (length,))
                    opened.create_virtual_dataset("episode_0/rewards", view)
            else:
                raise AssertionError(name)


DAMAGES = (
    "no data file", "cut short", "empty", "not HDF5", "no metadata", "metadata is not JSON", "metadata is a list",
    "metadata without observation_space", "metadata without data_format", "metadata without dataset_id",
    "too many episodes", "huge shape", "huge Discrete", "another format", "no groups", "no rewards",
    "words for rewards", "numbers for observations", "huge claim", "a pipe for main_data.hdf5",
    "a pipe for metadata.json", "a link to another file", "values in another file", "a view of another file",
)  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_minari_data_set_is_one_sentence(name: str, minari_folder: Path) -> None:
    assert len(read_minari("cart/pole-v0", minari_folder)) == 60
    damage(minari_folder, name)
    with limited(seconds=10, megabytes=300), pytest.raises(UserError) as refused:
        read_minari("cart/pole-v0", minari_folder)
    assert "cart/pole-v0" in str(refused.value)
    assert "MemoryError" not in str(refused.value)


@pytest.mark.parametrize("dataset_id", ["", "x", "../x-v0", "cart/pole-v1", "cart/pole", "a\0b-v0", "cart/pole-v0/d"])
def test_a_wrong_minari_id_is_one_sentence(dataset_id: str, minari_folder: Path) -> None:
    with pytest.raises(UserError):
        read_minari(dataset_id, minari_folder)


def test_a_minari_data_set_makes_no_environment(minari_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without spaces in its metadata Minari itself calls the entry point that they name."""
    monkeypatch.chdir(minari_folder)
    metadata = minari_folder / "cart" / "pole-v0" / "data" / "metadata.json"
    described = json.loads(metadata.read_text())
    spec = json.loads(described["env_spec"])
    spec.update(entry_point="os:system", kwargs={"command": "touch canary"})
    described["env_spec"] = json.dumps(spec)
    metadata.write_text(json.dumps(described))
    assert len(read_minari("cart/pole-v0", minari_folder)) == 60
    described.pop("observation_space")
    metadata.write_text(json.dumps(described))
    with pytest.raises(UserError, match="no observation_space"):
        read_minari("cart/pole-v0", minari_folder)
    assert not (minari_folder / "canary").exists()
