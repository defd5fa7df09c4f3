"""Spaces: what an algorithm sees of an environment, as plain data; actions both ways; observations for prediction."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces as gs

import env_zoo
from rl_training.envs.factory import make_env, read_recipe
from rl_training.envs.inputs import encode_for_prediction, read_masks
from rl_training.envs.probe import probe_spaces
from rl_training.envs.spaces import EnvSpaces, build_space, describe_space, image_layout
from rl_training.errors import UserError
from rl_training.record.checkpoints import load_checkpoint, save_checkpoint

EVERY_SPACE: list[gs.Space[Any]] = [
    gs.Box(-1.0, 1.0, (3,)),
    gs.Box(-np.inf, np.inf, (2, 3), np.float64),
    gs.Box(np.array([-1, 0]), np.array([5, 9]), dtype=np.int64),
    gs.Box(0, 255, (12, 10, 3), np.uint8),
    gs.Box(0, 1, (10, 10, 4), np.dtype(bool)),
    gs.Discrete(4),
    gs.Discrete(4, start=-2),
    *([gs.Discrete(4, dtype=np.int32)] if "dtype" in signature(gs.Discrete).parameters else []),  # not in Gymnasium 1.1
    gs.MultiDiscrete([2, 3]),
    gs.MultiDiscrete([2, 3], start=[1, 1], dtype=np.int32),
    gs.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    gs.MultiBinary(4),
    gs.MultiBinary([2, 2]),
    gs.Dict([("b", gs.Discrete(2)), ("a", gs.Box(0, 1, (2,)))]),
    gs.Tuple([gs.Discrete(2), gs.Dict({"x": gs.MultiBinary(3)})]),
]


def spaces_of(name: str, **env_kwargs: Any) -> EnvSpaces:
    return probe_spaces(read_recipe(f"env_zoo:{name}", env_kwargs))


def of_gym(observation: gs.Space[Any] | None = None, action: gs.Space[Any] | None = None) -> EnvSpaces:
    return EnvSpaces.from_gym("Env-v0", observation or gs.Box(-1, 1, (2,)), action or gs.Discrete(2))


def one_sentence(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    assert len(text) < 400
    return text


# ---- plain data ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", EVERY_SPACE, ids=str)
def test_a_space_survives_the_checkpoint_file(space: gs.Space[Any], tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "file", {"space": describe_space(space)}, durable=False)
    back = build_space(load_checkpoint(path)["space"])
    assert back == space
    assert back.dtype == space.dtype
    assert type(back) is type(space)


def test_the_parts_of_a_dict_keep_their_order() -> None:
    """The order in which they are flattened: alphabetical order would hand a policy permuted observations."""
    back = build_space(describe_space(gs.Dict([("b", gs.Discrete(2)), ("a", gs.Discrete(3))])))
    assert isinstance(back, gs.Dict)
    assert list(back.spaces) == ["b", "a"]


@pytest.mark.parametrize(
    "name", ["Walk", "DictObservation", "TupleObservation", "DiscreteObservation", "Image", "MinAtarLike", "BoxActions",
             "MultiDiscreteActions", "MultiBinaryActions", "Masked"],
)  # fmt: skip
def test_spaces_survive_the_checkpoint_file(name: str, tmp_path: Path) -> None:
    spaces = spaces_of(name)
    path = save_checkpoint(tmp_path / "file", spaces.to_dict(), durable=False)
    back = EnvSpaces.from_dict(load_checkpoint(path))
    assert back.observation_space == spaces.observation_space
    assert back.action_space == spaces.action_space
    for field in ("obs_kind", "obs_shape", "obs_dtype", "image_layout", "image_scale", "action_kind", "action_sizes"):
        assert getattr(back, field) == getattr(spaces, field)
    assert back.has_action_mask == spaces.has_action_mask


@pytest.mark.parametrize(
    ("name", "kind", "shape", "scale"),
    [
        ("Walk", "vector", (2,), 1.0),
        ("DictObservation", "vector", (54,), 1.0),
        ("TupleObservation", "vector", (52,), 1.0),
        ("DiscreteObservation", "vector", (50,), 1.0),
        ("Image", "image", (3, 12, 10), 255.0),
        ("ImageChannelFirst", "image", (3, 12, 10), 255.0),
        ("ImagePlane", "image", (1, 12, 10), 255.0),
        ("MinAtarLike", "image", (4, 10, 10), 1.0),
    ],
)
def test_what_an_algorithm_sees(name: str, kind: str, shape: tuple[int, ...], scale: float) -> None:
    spaces = spaces_of(name)
    assert (spaces.obs_kind, spaces.obs_shape, spaces.image_scale) == (kind, shape, scale)
    env = make_env(read_recipe(f"env_zoo:{name}", {}))
    observation, _ = env.reset(seed=3)
    encoded = spaces.encode(np.stack([observation, observation]))
    assert encoded.shape == (2, *shape)
    assert encoded.dtype == spaces.obs_dtype == ("uint8" if kind == "image" else "float32")


def test_an_image_lies_channels_first_whatever_the_environment_has() -> None:
    raw = np.arange(12 * 10 * 3, dtype=np.uint8).reshape(12, 10, 3)
    last = spaces_of("Image").encode(raw[None])
    first = spaces_of("ImageChannelFirst").encode(raw.transpose(2, 0, 1)[None])
    assert np.array_equal(last, first)
    assert np.array_equal(last[0, 2], raw[:, :, 2])


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((84, 84), "plane"), ((3, 84, 84), "channels_first"), ((84, 84, 3), "channels_last"),
        ((4, 10, 8), "channels_first"),
        ((210, 160, 3), "channels_last"), ((10, 10, 16), "channels_last"), ((16, 10, 10), "channels_first"),
        ((10, 10, 10), "channels_last"), ((2, 2), None), ((2, 2, 3), None), ((5,), None), ((2, 9, 9, 3), None),
    ],
)  # fmt: skip
def test_layout_of_images(shape: tuple[int, ...], layout: str | None) -> None:
    assert image_layout(gs.Box(0, 255, shape, np.uint8)) == layout
    assert image_layout(gs.Box(0, 1, shape, np.float32)) is None


@pytest.mark.parametrize(
    ("name", "kind", "sizes", "dim", "shape"),
    [
        ("Walk", "discrete", (2,), 2, ()),
        ("ShiftedDiscrete", "discrete", (3,), 3, ()),
        ("BoxActions", "continuous", (1, 1), 2, (2,)),
        ("MultiDiscreteActions", "multi_discrete", (2, 3, 4), 9, (3,)),
        ("MultiBinaryActions", "multi_binary", (2, 2, 2), 6, (3,)),
    ],
)
def test_what_a_policy_must_produce(
    name: str, kind: str, sizes: tuple[int, ...], dim: int, shape: tuple[int, ...]
) -> None:
    spaces = spaces_of(name)
    assert (spaces.action_kind, spaces.action_sizes) == (kind, sizes)
    assert (spaces.action_dim, spaces.action_shape) == (dim, shape)


# ---- actions ---------------------------------------------------------------------------------------------------------


ACTION_SPACES: list[gs.Space[Any]] = [
    gs.Discrete(4), gs.Discrete(4, start=-2), gs.MultiDiscrete([2, 3], start=[1, 5]),
    gs.MultiDiscrete(np.array([[2, 3], [4, 5]])), gs.MultiBinary(4),
    gs.MultiBinary([2, 2]), gs.Box(-2.0, 2.0, (1,)), gs.Box(-0.1, 0.3, (2, 2), np.float64),
    gs.Box(-1.0, 5.0, (), np.float32), gs.Box(0, 10, (2,), np.int64),
]  # fmt: skip


@pytest.mark.parametrize("space", ACTION_SPACES, ids=str)
def test_unmapping_is_the_inverse_of_mapping(space: gs.Space[Any]) -> None:
    spaces = of_gym(action=space)
    space.seed(0)
    given = np.stack([space.sample() for _ in range(50)])
    policy_actions = spaces.unmap_actions(given)
    assert policy_actions.shape == (50, *spaces.action_shape)
    mapped = spaces.map_actions(policy_actions)
    assert mapped.dtype == space.dtype
    if spaces.action_kind == "continuous" and np.dtype(space.dtype).kind == "f":
        assert np.allclose(mapped, given, atol=1e-5)
        assert np.abs(policy_actions).max() <= 1.0
    else:
        assert np.array_equal(mapped, given)


@pytest.mark.parametrize("space", [space for space in ACTION_SPACES if isinstance(space, gs.Box)], ids=str)
def test_no_action_of_a_policy_leaves_the_bounds(space: gs.Box) -> None:
    spaces = of_gym(action=space)
    rng = np.random.default_rng(0)
    raw = np.concatenate([rng.normal(0, 3, (200, spaces.action_dim)), np.full((1, spaces.action_dim), 1.0)])
    for action in spaces.map_actions(raw.astype(np.float32)):
        assert space.contains(np.asarray(action))


def test_the_middle_and_the_ends_of_a_box() -> None:
    mapped = spaces_of("BoxActions").map_actions(np.array([[-1, -1], [0, 0], [1, 1], [9, -9]], dtype=np.float32))
    assert np.allclose(mapped, [[-0.1, 2.0], [0.1, 3.5], [0.3, 5.0], [0.3, 2.0]])


def test_plain_discrete_actions_are_handed_through_untouched() -> None:
    actions = np.array([0, 1, 1])
    assert spaces_of("Walk").map_actions(actions) is actions


def test_a_dimension_without_room_maps_to_its_only_value() -> None:
    spaces = of_gym(action=gs.Box(np.array([1.0, -1.0]), np.array([1.0, 1.0]), dtype=np.float64))
    unmapped = spaces.unmap_actions(np.array([[1.0, 0.5]]))
    assert np.isfinite(unmapped).all()
    assert np.allclose(spaces.map_actions(unmapped), [[1.0, 0.5]])


# ---- masks -----------------------------------------------------------------------------------------------------------


def test_masks_are_flat_booleans() -> None:
    spaces = spaces_of("MaskedFactors")
    assert spaces.has_action_mask
    for mask in ((np.array([1, 0, 1]), np.ones(5)), [[1, 0, 1], [1] * 5], np.array([1, 0, 1, 1, 1, 1, 1, 1])):
        assert np.array_equal(read_masks([{"action_mask": mask}], spaces), [[True, False] + [True] * 6])  # type: ignore[arg-type]
    assert np.all(read_masks([{}], spaces))


def test_a_mask_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(UserError, match="4 entries; its action space needs 8") as error:
        read_masks([{"action_mask": np.ones(4)}], spaces_of("MaskedFactors"))
    one_sentence(error)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_infinite_action_bounds_are_refused_and_the_advice_helps() -> None:
    with pytest.raises(UserError, match=r"infinite bounds; give it finite ones, such as with (.*)\.$") as error:
        spaces_of("InfiniteActions")
    one_sentence(error)
    advice = str(error.value).partition("such as with ")[2].removesuffix(".")
    names = {"gymnasium": gym, "env": env_zoo.InfiniteActions(), "low": -2.0, "high": 2.0, "shape": (1,)}
    wrapped = eval(advice, names)
    assert probe_spaces(read_recipe("custom", {}, lambda: wrapped)).action_kind == "continuous"


@pytest.mark.parametrize(
    "space", [gs.Text(5), gs.Sequence(gs.Discrete(2)), gs.Graph(gs.Discrete(2), None), gs.Dict({"words": gs.Text(5)}),
              gs.Tuple([gs.Discrete(2), gs.Sequence(gs.Discrete(2))]), gs.Box(0, 1, (0,))],
    ids=str,
)  # fmt: skip
def test_unsupported_observations_are_refused(space: gs.Space[Any]) -> None:
    with pytest.raises(UserError, match=r"observation space .* of Env-v0 is not supported") as error:
        of_gym(observation=space)
    one_sentence(error)


@pytest.mark.parametrize("space", [gs.Text(5), gs.Dict({"a": gs.Discrete(2)}), gs.Tuple([gs.Discrete(2)])], ids=str)
def test_unsupported_actions_are_refused(space: gs.Space[Any]) -> None:
    with pytest.raises(UserError, match=r"action space .* of Env-v0 is not supported") as error:
        of_gym(action=space)
    one_sentence(error)


# ---- prediction ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["Walk", "DictObservation", "TupleObservation", "DiscreteObservation", "Image", "ImageChannelFirst",
             "ImagePlane", "MinAtarLike"],
)  # fmt: skip
def test_prediction_sees_what_training_saw(name: str) -> None:
    spaces = spaces_of(name)
    raw, _ = getattr(env_zoo, name)().reset(seed=3)
    trained, _ = make_env(read_recipe(f"env_zoo:{name}", {})).reset(seed=3)
    expected = spaces.encode(np.stack([trained]))
    for given in (raw, as_json(raw)):
        single, was_batch = encode_for_prediction(spaces, given)
        assert not was_batch
        assert np.array_equal(single, expected)
        batch, was_batch = encode_for_prediction(spaces, [given, given, given])
        assert was_batch
        assert np.array_equal(batch, np.concatenate([expected] * 3))


def as_json(value: Any) -> Any:
    """As it comes out of a JSON file: lists and plain numbers."""
    if isinstance(value, dict):
        return {name: as_json(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return [as_json(part) for part in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize(
    "bad", [None, "words", "1", [], [[]], [1.0], [1.0, 2.0, 3.0], [[1.0, 2.0], [3.0]], [float("nan"), 0.0],
            [float("inf"), 0], ["a", "b"], {"x": 1},
            [[[1.0, 2.0]]], 3.0, [None, None], np.zeros((0, 2)), np.zeros(2, dtype=complex),
            [10**400, 1], [1e300, 0.0]],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_a_wrong_vector_gets_one_sentence(bad: Any) -> None:
    with pytest.raises(UserError) as error:
        encode_for_prediction(spaces_of("Walk"), bad)
    one_sentence(error)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("DiscreteObservation", 50), ("DiscreteObservation", 1.5), ("DiscreteObservation", float("inf")),
        ("DiscreteObservation", [0, 99]), ("DiscreteObservation", 10**30), ("DiscreteObservation", {}),
        ("DictObservation", {}), ("DictObservation", {"walk": [0, 0], "clock": 1}), ("DictObservation", 3),
        ("DictObservation", {"walk": [0, 0], "clock": 1, "more": {"flags": [0, 2]}}),
        ("DictObservation", {"walk": [0, 0], "clock": 1, "more": [0, 1]}), ("DictObservation", []),
        ("DictObservation", {"walk": [0, 0], "clock": 1, "more": {"flags": [0, 1]}, "extra": 1}),
        ("TupleObservation", [1]), ("TupleObservation", 1), ("TupleObservation", [99, [0.0, 0.0]]),
        ("TupleObservation", [[99, [0.0, 0.0]]]), ("TupleObservation", []),
        ("ImagePlane", np.full((12, 10), 256)), ("ImagePlane", np.full((12, 10), -1)),
        ("ImagePlane", np.full((12, 10), 0.5)),
        ("ImagePlane", np.zeros((10, 12))), ("MinAtarLike", np.full((10, 10, 4), 2)),
    ],
)  # fmt: skip
def test_a_wrong_observation_gets_one_sentence(name: str, bad: Any) -> None:
    with pytest.raises(UserError) as error:
        encode_for_prediction(spaces_of(name), bad)
    one_sentence(error)


def test_the_sentence_names_a_value_that_is_not_in_the_space() -> None:
    one = EnvSpaces.from_gym("mine", gs.Discrete(6), gs.Discrete(2))
    with pytest.raises(UserError, match=r"^obs is 7, which is not in the observation space Discrete\(6\) of mine\.$"):
        encode_for_prediction(one, 7)
    many = EnvSpaces.from_gym("mine", gs.MultiBinary(9), gs.Discrete(2))
    with pytest.raises(UserError, match=r"^obs is not in the observation space MultiBinary\(9\) of mine\.$"):
        encode_for_prediction(many, [2] * 9)


def test_the_sentence_names_the_part_that_is_wrong() -> None:
    good = {"walk": [0, 0], "clock": 1, "more": {"flags": [0, 1]}}
    spaces = spaces_of("DictObservation")
    assert encode_for_prediction(spaces, good)[0].shape == (1, 54)
    with pytest.raises(UserError, match=r"obs\.walk has the shape \(3,\)"):
        encode_for_prediction(spaces, {**good, "walk": [0, 0, 0]})


def test_predictions_of_gymnasium_environments() -> None:
    spaces = probe_spaces(read_recipe("CartPole-v1", {}))
    row, was_batch = encode_for_prediction(spaces, [0, 0.5, 0, 1])
    assert row.dtype == np.float32
    assert not was_batch
    assert probe_spaces(read_recipe("Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3", {})).has_action_mask
