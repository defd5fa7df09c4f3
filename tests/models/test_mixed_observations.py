"""Images inside a Dict or Tuple: kept as bytes, read by convolutions, joined with the other parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from env_zoo import Walk
from registry_contract import OBSERVATIONS, AnyKind, kind_config
from resume_cases import assert_same_run, stop_and_resume
from rl_training.config.networks import make_encoder, make_input
from rl_training.config.params import Params
from rl_training.config.spec import get_algorithm_spec
from rl_training.data import TransitionDataset
from rl_training.envs.factory import read_recipe
from rl_training.envs.inputs import encode_for_prediction
from rl_training.envs.probe import probe, probe_spaces
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.models.blocks import MixedEncoder
from rl_training.models.dreamer import Decoder, Encoder, PartsDecoder, PartsEncoder
from rl_training.run.evaluation import read_replay_buffer
from rl_training.run.learner import load_policy
from rl_training.run.workflows import train
from rl_training.tools.doctor import OK, check_environment
from rl_training.tools.export import export_policy

NESTED = gs.Tuple(
    [
        gs.Discrete(3),
        gs.Dict(
            [
                ("left", gs.Box(0, 255, (5, 4, 3), np.uint8)),
                ("speed", gs.Box(-np.inf, np.inf, (2,), np.float64)),
                ("grid", gs.Box(0, 1, (4, 6), np.dtype(bool))),
                ("right", gs.Box(0, 255, (2, 5, 5), np.uint8)),
            ]
        ),
    ]
)
PIXELS = 5 * 4 * 3 + 4 * 6 + 2 * 5 * 5
ONLY_IMAGES = gs.Dict(left=gs.Box(0, 255, (4, 4), np.uint8), right=gs.Box(0, 255, (4, 4), np.uint8))


def spaces_of(space: gs.Space[Any], **flags: bool) -> EnvSpaces:
    return EnvSpaces.from_gym("Mixed-v0", space, gs.Discrete(2), **flags)


def sample(space: gs.Space[Any], count: int) -> list[Any]:
    space.seed(0)
    return [space.sample() for _ in range(count)]


def test_a_pixel_takes_one_byte_and_a_float_four() -> None:
    spaces = spaces_of(NESTED)
    assert (spaces.obs_kind, spaces.obs_dtype, spaces.obs_shape) == ("mixed", "uint8", (PIXELS + 4 * 5,))
    assert spaces.obs_dim == PIXELS + 5
    assert [part.shape for part in spaces.image_parts] == [(3, 5, 4), (1, 4, 6), (2, 5, 5)]
    assert [part.scale for part in spaces.image_parts] == [255.0, 1.0, 255.0]


@pytest.mark.parametrize("space", [NESTED, OBSERVATIONS["mixed"], ONLY_IMAGES], ids=["nested", "dict", "images"])
def test_decoding_is_the_inverse_of_encoding(space: gs.Space[Any]) -> None:
    spaces = spaces_of(space)
    rows = np.stack([gs.flatten(space, row) for row in sample(space, 6)]).astype(np.float32)
    encoded = spaces.encode(rows)
    assert encoded.dtype == np.uint8
    np.testing.assert_array_equal(spaces.decode(encoded), rows)
    given = [list(row) if isinstance(row, tuple) else row for row in sample(space, 6)]
    np.testing.assert_array_equal(encode_for_prediction(spaces, given)[0], encoded)


def test_the_network_reads_images_over_their_scale_and_the_vector_as_it_is() -> None:
    spaces, rows = spaces_of(NESTED), sample(NESTED, 4)
    encoded = torch.from_numpy(spaces.encode(np.stack([gs.flatten(NESTED, row) for row in rows])))
    read = make_input(spaces)(encoded)
    for got, (choice, parts) in zip(read.numpy(), rows, strict=True):
        pieces = [
            parts["left"].transpose(2, 0, 1) / 255.0, parts["grid"] * 1.0, parts["right"] / 255.0,
            np.eye(3)[choice], parts["speed"],
        ]  # fmt: skip
        np.testing.assert_allclose(got, np.concatenate([np.ravel(piece) for piece in pieces]), rtol=1e-6)


@pytest.mark.parametrize("lead", [(4,), (2, 2), (0,)])
def test_images_without_a_vector_are_read(lead: tuple[int, ...]) -> None:
    spaces = spaces_of(ONLY_IMAGES)
    rows = torch.randint(255, (*lead, 32), dtype=torch.uint8)
    torch.testing.assert_close(make_input(spaces)(rows), rows / 255.0)


def test_a_row_of_any_place_in_memory_is_read() -> None:
    """Floats that begin at an odd byte, as those of a row in the middle of a buffer do."""
    spaces = spaces_of(gs.Dict(grid=gs.Box(0, 255, (3, 3), np.uint8), speed=gs.Box(-1, 1, (2,))))
    rows = np.random.default_rng(0).random((5, 11)).astype(np.float32)
    encoded, layer = torch.from_numpy(spaces.encode(rows)), make_input(spaces)
    assert encoded.shape[1] % 4 != 0
    one_by_one = torch.cat([layer(encoded[row : row + 1]) for row in range(5)])
    torch.testing.assert_close(one_by_one, layer(encoded), rtol=0, atol=0)
    torch.testing.assert_close(layer(encoded.view(5, 1, -1)).squeeze(1), layer(encoded), rtol=0, atol=0)
    torch.testing.assert_close(one_by_one[:, 9:], torch.from_numpy(rows[:, 9:]), rtol=0, atol=0)


def test_only_the_vector_is_normalized() -> None:
    spaces = spaces_of(OBSERVATIONS["mixed"], normalize_observations=True)
    layer, plain = make_input(spaces), make_input(spaces, normalize=False)
    rows = sample(OBSERVATIONS["mixed"], 50)
    encoded = torch.from_numpy(spaces.encode(np.stack([gs.flatten(OBSERVATIONS["mixed"], row) for row in rows])))
    layer.update(encoded)
    read, raw = layer(encoded), plain(encoded)
    torch.testing.assert_close(read[:, :90], raw[:, :90], rtol=0, atol=0)
    torch.testing.assert_close(read[:, 90:].mean(0), torch.zeros(5), rtol=0, atol=1e-5)
    assert raw[:, 90:].abs().max() > 50


def test_every_image_goes_through_convolutions_of_its_own_and_the_vector_around_them() -> None:
    encoder = make_encoder(Params(), spaces_of(NESTED))
    assert isinstance(encoder, MixedEncoder)
    x = torch.rand(2, PIXELS + 5, generator=torch.Generator().manual_seed(0))
    features = encoder(x)
    assert features.shape == (2, encoder.out_dim) == (2, 3 * 128 + 5)
    torch.testing.assert_close(features[:, -5:], x[:, -5:], rtol=0, atol=0)
    changed = x.clone()
    changed[:, 60:84] = 0.0  # the grid
    moved = (encoder(changed) != features).any(0)
    assert moved[128:256].any()
    assert not moved[:128].any()
    assert not moved[256:].any()


def test_dreamer_encodes_and_predicts_each_part_as_if_it_were_alone() -> None:
    shapes, layers = [(3, 5, 4), (2,)], {"depth": 4, "hidden_sizes": (8,)}
    torch.manual_seed(0)
    encoder = PartsEncoder(shapes=shapes, **layers)
    decoder = PartsDecoder(shapes=shapes, feature_dim=6, **layers)
    image, vector = torch.rand(4, 3, 3, 5, 4), 10.0 * torch.randn(4, 3, 2)
    targets = decoder.targets(torch.cat([image.flatten(2), vector], -1))
    alone = image, Decoder(obs_shape=(2,), feature_dim=6, **layers).targets(vector)  # type: ignore[arg-type]
    torch.testing.assert_close(targets, torch.cat([part.flatten(2) for part in alone], -1), rtol=0, atol=0)
    embeds = torch.cat([part(obs) for part, obs in zip(encoder.encoders, alone, strict=True)], -1)
    torch.testing.assert_close(encoder(targets), embeds, rtol=0, atol=0)
    assert all(isinstance(part, Encoder) for part in encoder.encoders)
    features = torch.randn(4, 3, 6)
    losses = sum(part.loss(part(features), obs) for part, obs in zip(decoder.decoders, alone, strict=True))
    torch.testing.assert_close(decoder.loss(decoder(features), targets), losses)


@pytest.mark.parametrize("algo", ["ppo", "dqn", "dreamer"])
def test_a_resumed_run_is_the_run_that_never_stopped(algo: str, tmp_path: Path) -> None:
    wrappers = {"wrappers": {"normalize_observation": True}}
    config = kind_config(algo, tmp_path, "discrete", "mixed")
    config = config.model_copy(update={"env_kwargs": {**config.env_kwargs, **wrappers}})
    assert_same_run(train(config, console=False), stop_and_resume(config, 32))


@pytest.mark.slow
def test_workers_learn_what_one_process_learns(tmp_path: Path) -> None:
    """Rows go through shared memory, and the environment is in another process."""
    config = kind_config("ppo", tmp_path, "discrete", "mixed", vectorization="sync")
    one = train(config, console=False)
    two = train(config.model_copy(update={"vectorization": "async"}), console=False)
    for mine, theirs in zip(one.policy.algorithm.parameters(), two.policy.algorithm.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", "dreamer"])
def test_an_exported_policy_takes_the_parts_as_they_are(algo: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from rl_training.deploy import Policy

    checkpoint = train(kind_config(algo, tmp_path, "discrete", "mixed"), console=False).checkpoint_path
    exported, rows = Policy(export_policy(checkpoint, "onnx").path), sample(OBSERVATIONS["mixed"], 20)
    own = load_policy(checkpoint)
    assert [exported.predict(row) for row in rows] == [own.predict(row) for row in rows]


def test_replay_keeps_bytes_and_gives_the_environments_own_rows_back(tmp_path: Path) -> None:
    config = kind_config("dqn", tmp_path, "discrete", "mixed")
    dataset = read_replay_buffer(train(config, console=False).checkpoint_path)
    assert isinstance(dataset, TransitionDataset)
    space = OBSERVATIONS["mixed"]
    for row in dataset.obs:
        parts = gs.unflatten(space, row.astype(np.float64))
        t = int(parts["speed"][1])
        assert (parts["camera"] == t).all()
        assert parts["gear"] == t % 3


def test_a_nan_among_the_floats_is_refused_although_bytes_have_none(tmp_path: Path) -> None:
    class Broken(AnyKind):
        def observe(self) -> Any:
            parts = super().observe()
            return parts | {"speed": parts["speed"] * (np.nan if self.t == 3 else 1.0)}

    config = kind_config("ppo", tmp_path, "discrete", "mixed", num_envs=1)
    with pytest.raises(EnvironmentFailure, match="returned an observation with a NaN"):
        train(config, env=Broken, console=False)


@pytest.mark.parametrize("algo", ["mbpo", "mopo"])
def test_an_algorithm_that_reads_vectors_only_says_so(algo: str, tmp_path: Path) -> None:
    config = kind_config(algo, tmp_path, "continuous", "mixed")
    with pytest.raises(UserError, match=rf"^{algo} does not support the mixed observations \(images in a Dict or Tu"):
        train(config, console=False)


def test_frames_of_a_dict_are_not_stacked() -> None:
    kinds = {"action": "discrete", "observation": "mixed", "wrappers": {"frame_stack": 2}}
    with pytest.raises(UserError, match="frame_stack does not stack images inside a Dict or Tuple"):
        probe_spaces(read_recipe("registry_contract:AnyKind", kinds))


def test_images_alone_have_nothing_to_normalize() -> None:
    class Cameras(Walk):
        observation_space = ONLY_IMAGES

        def observe(self) -> Any:
            return {"left": np.full((4, 4), self.t, np.uint8), "right": np.zeros((4, 4), np.uint8)}

    assert probe_spaces(read_recipe("cameras", {}, Cameras)).obs_shape == (32,)
    with pytest.raises(UserError, match="normalize_observation is for vectors"):
        probe_spaces(read_recipe("cameras", {"wrappers": {"normalize_observation": True}}, Cameras))


def test_doctor_looks_at_the_floats() -> None:
    recipe = read_recipe("registry_contract:AnyKind", {"action": "discrete", "observation": "mixed", "length": 30})
    checks = {check.name: check for check in check_environment(recipe, probe(recipe), get_algorithm_spec("ppo"))}
    assert "read as mixed" in checks["observations"].detail
    assert checks["observations"].status == OK
    assert checks["algorithm"].status == OK
