"""Whatever a file holds, reading it gives a valid result or a UserError of one line, within limits on memory, time."""

from __future__ import annotations

import copy
import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from env_zoo import DictObservation, TupleObservation, Walk
from limits import limited
from resume_cases import tiny
from rl_training.cli.checkpoint import read_values
from rl_training.cli.options import apply_settings
from rl_training.config.params import read_params
from rl_training.config.spec import get_algorithm_spec
from rl_training.config.train_config import Presets, TrainConfig, load_config
from rl_training.data import TransitionDataset, load_transition_dataset
from rl_training.data.loading import read_minari, write_minari
from rl_training.errors import UserError
from rl_training.record.checkpoints import load_checkpoint
from rl_training.run.learner import TrainedPolicy, load_policy
from rl_training.run.workflows import train

FEW = settings(
    max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
MANY = settings(FEW, max_examples=2000)
amounts = pytest.mark.parametrize("amount", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])

numbers = st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from([0, 1, -1, 10**9, 2**62, 1e308])
leaves = st.none() | st.booleans() | numbers | st.text(max_size=8)
names = st.text(max_size=6) | st.sampled_from(["", "<<", "type", "seed", "env_id", "algo", "algo_kwargs", "gamma"])
trees = st.recursive(
    leaves, lambda part: st.lists(part, max_size=4) | st.dictionaries(names, part, max_size=4), max_leaves=12
)


def read_or_refuse(read: Callable[[], Any], *, megabytes: int = 500, seconds: float = 10) -> Any:
    """The result, or None where it is refused as it should be."""
    try:
        with limited(seconds=seconds, megabytes=megabytes):
            return read()
    except UserError as error:
        sentence = str(error)
    assert sentence
    assert "\n" not in sentence
    assert "MemoryError" not in sentence
    return None


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes with some changed, cut, repeated or put in."""
    result = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(0, len(result) - 1)))
        length = draw(st.sampled_from([1, 1, 1, 2, 8, 64]))
        kind = draw(st.sampled_from(["set", "set", "set", "cut", "put", "end", "twice"]))
        if kind == "set":
            result[start : start + length] = draw(st.binary(min_size=length, max_size=length))
        elif kind == "cut":
            del result[start : start + length]
        elif kind == "put":
            result[start:start] = draw(st.binary(max_size=length))
        elif kind == "end":
            del result[start:]
        else:
            result[start:start] = result[start : start + length]
    return bytes(result)


@st.composite
def edited(draw: st.DrawFn, tree: Any) -> Any:
    """The tree with one of its parts replaced, dropped or doubled."""
    root = [copy.deepcopy(tree)]
    owner: Any = root
    key: Any = 0
    while isinstance(owner[key], dict | list) and owner[key] and draw(st.integers(0, 4)):
        owner = owner[key]
        key = draw(st.sampled_from(list(owner) if isinstance(owner, dict) else list(range(len(owner)))))
    match draw(st.sampled_from(["replace", "replace", "replace", "drop", "more"])):
        case "drop" if owner is not root:
            del owner[key]
        case "more" if isinstance(owner, dict):
            owner[draw(names)] = draw(trees)
        case _:
            owner[key] = draw(trees)
    return root[0]


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    config = tiny("ppo", tmp_path_factory.mktemp("run"), kwargs={"hidden_sizes": [4]})
    return train(config, console=False).checkpoint_path.read_bytes()


@amounts
def test_a_damaged_checkpoint_is_read_whole_or_refused(amount: settings, checkpoint: bytes, tmp_path: Path) -> None:
    original = load_checkpoint(write(tmp_path / "right.ckpt", checkpoint))

    @amount
    @given(damaged(checkpoint))
    def holds(data: bytes) -> None:
        path = write(tmp_path / "x.ckpt", data)
        tree = read_or_refuse(lambda: load_checkpoint(path))
        assert tree is None or list(tree) == list(original)  # a checksum, so what is read is what was written

    holds()


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def split_checkpoint(data: bytes) -> tuple[bytes, Any]:
    """Header and arrays, and the index."""
    length = struct.unpack_from("<Q", data, len(data) - 20)[0]
    return data[: -20 - length], json.loads(data[-20 - length : -20])


def join_checkpoint(body: bytes, index: Any) -> bytes:
    """A file of these parts with a right checksum."""
    text = json.dumps(index).encode("ascii")
    body += text + struct.pack("<Q", len(text))
    return body + struct.pack("<I8s", zlib.crc32(body), b"\nRLTend\n")


@amounts
def test_an_edited_index_under_a_right_checksum_gives_a_policy_or_is_refused(
    amount: settings, checkpoint: bytes, tmp_path: Path
) -> None:
    body, index = split_checkpoint(checkpoint)
    load_policy(write(tmp_path / "right.ckpt", join_checkpoint(body, index)))
    index["source"] = {}  # which `load_policy` does not look at; the tree's own parts are worth the examples

    @amount
    @given(edited(index))
    def holds(changed: Any) -> None:
        path = write(tmp_path / "x.ckpt", join_checkpoint(body, changed))
        policy = read_or_refuse(lambda: load_policy(path))
        if policy is not None:
            read_or_refuse(lambda: policy.predict(np.zeros(4, np.float32)))

    holds()


# ---- data sets ------------------------------------------------------------------------------------------------------

SHAPES = st.sampled_from([(), (0,), (1,), (3,), (3,), (3,), (3, 1), (3, 2), (3, 2), (2, 3), (3, 0)])
DTYPES = st.sampled_from(["<f4", "<f4", "<f8", "<f2", "<i8", "|u1", "|b1", "<U3", "|S2", "<c8", "<M8[s]", ">f4"])


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    return draw(hnp.arrays(np.dtype(draw(DTYPES)), draw(SHAPES)))


ROWS = {
    "obs": np.zeros((3, 2), np.float32), "next_obs": np.ones((3, 2), np.float32), "actions": np.arange(3),
    "rewards": np.ones(3, np.float32), "terminated": np.zeros(3, bool), "truncated": np.zeros(3, bool),
}  # fmt: skip


def look_at(dataset: TransitionDataset | None) -> None:
    """A data set that was read can be looked at, saved and sampled."""
    if dataset is not None:
        with np.errstate(all="ignore"):
            dataset.check()
        assert len(dataset.sha256) == 64
        dataset.minibatch(np.random.default_rng(0), 4)
        json.dumps(dataset.metadata)


@amounts
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_npz_of_any_arrays_is_a_data_set_or_is_refused(amount: settings, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"

    @amount
    @given(st.dictionaries(st.sampled_from([*ROWS, "other"]), arrays(), max_size=3), trees)
    def holds(changes: dict[str, Any], metadata: Any) -> None:
        np.savez(path, metadata_json=np.array(json.dumps(metadata)), **{**ROWS, **changes})
        look_at(read_or_refuse(lambda: TransitionDataset.from_npz(path)))

    holds()


@amounts
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
def test_a_damaged_npz_or_npy_is_read_or_refused(amount: settings, tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "right.npz", **ROWS)  # type: ignore[arg-type]
    file = io.BytesIO()
    np.save(file, np.arange(4.0))
    archive, array = (tmp_path / "right.npz").read_bytes(), file.getvalue()

    @amount
    @given(damaged(archive) | st.binary(max_size=50), damaged(array) | st.binary(max_size=50))
    def holds(npz: bytes, npy: bytes) -> None:
        path = write(tmp_path / "x.npz", npz)
        look_at(read_or_refuse(lambda: TransitionDataset.from_npz(path)))
        single = write(tmp_path / "x.npy", npy)
        given = read_or_refuse(lambda: read_values("--obs", str(single), "numbers"))
        assert given is None or isinstance(given, np.ndarray)

    holds()


@amounts
def test_a_damaged_minari_data_set_is_read_or_refused(amount: settings, tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    pytest.importorskip("minari")
    dataset = load_transition_dataset("random", env_id="CartPole-v1", size=20)
    write_minari(dataset, "cart/pole-v0", tmp_path, env_id="CartPole-v1")
    folder = tmp_path / "cart" / "pole-v0" / "data"
    data, described = (folder / "main_data.hdf5").read_bytes(), json.loads((folder / "metadata.json").read_text())

    @amount
    @given(st.just(data) | damaged(data), st.just(described) | edited(described))
    def holds(hdf5: bytes, metadata: Any) -> None:
        write(folder / "main_data.hdf5", hdf5)
        (folder / "metadata.json").write_text(json.dumps(metadata))
        read_or_refuse(lambda: read_minari("cart/pole-v0", tmp_path))

    holds()


# ---- configs --------------------------------------------------------------------------------------------------------

PRESET = Presets.joinpath("ppo/cartpole.yaml").read_text(encoding="utf-8")
yaml_texts = st.text("abe01.:-{}[]&*<!|>'\"#%@,? \n\t", max_size=60) | st.sampled_from(
    ["!!bool x", "!!int ''", "!!timestamp x", "!!float x", "!!python/name:os.system ''", "? [a]: b", "0x", "=", "<<: 1"]
)


@amounts
def test_a_config_of_any_text_is_read_or_refused(amount: settings, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"

    @amount
    @given(damaged(PRESET.encode()) | yaml_texts.map(str.encode) | st.tuples(yaml_texts, yaml_texts).map(
        lambda pair: f"{PRESET}\n{pair[0]}: {pair[1]}\n".encode()
    ))  # fmt: skip
    def holds(text: bytes) -> None:
        write(path, text)
        check_config(read_or_refuse(lambda: load_config(path)))

    holds()


@amounts
def test_a_config_of_any_mapping_is_read_or_refused(amount: settings) -> None:
    preset = yaml.safe_load(PRESET)

    @amount
    @given(edited(preset) | trees, st.text("ab=.:{}[]1e-<*& ", max_size=12))
    def holds(data: Any, setting: str) -> None:
        if isinstance(data, dict):
            check_config(read_or_refuse(lambda: load_config(data)))
        read_or_refuse(lambda: apply_settings(preset, [f"gamma={setting}", setting]))

    holds()


def check_config(config: TrainConfig | None) -> None:
    if config is not None:
        read_or_refuse(lambda: read_params(get_algorithm_spec(config.algo).params, config.algo_kwargs))
        assert TrainConfig.model_validate_json(config.model_dump_json()) == config


# ---- observations ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[TrainedPolicy]:
    folder = tmp_path_factory.mktemp("policies")
    zoo = (Walk, DictObservation, TupleObservation)
    return [train(tiny("ppo", folder, env_id=env.__name__), env=env, console=False).policy for env in zoo]


@st.composite
def observations(draw: st.DrawFn) -> str:
    """JSON near what a policy takes, or any other."""
    right = [[0.5, 1.0], {"walk": [0.5, 1.0], "clock": 3, "more": {"flags": [0, 1]}}, [3, [0.5, 1.0]]]
    tree = draw(st.sampled_from([*right, right, [right[1]]]).flatmap(edited) | trees)
    text = json.dumps(tree)
    return draw(st.just(text) | st.just("[" * draw(st.integers(1, 5000)) + "1" + "]" * 5000) | st.just(text[1:]))


@amounts
def test_predict_answers_or_refuses_any_json(amount: settings, policies: list[TrainedPolicy]) -> None:
    @amount
    @given(observations(), st.sampled_from(policies))
    def holds(text: str, policy: TrainedPolicy) -> None:
        def predict() -> Any:
            return policy.predict(read_values("--obs", text, "x"))

        action = read_or_refuse(predict)
        assert action is None or policy.spaces.action_space.contains(np.asarray(action).flat[0])

    holds()
