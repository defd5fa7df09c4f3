"""Parameters that are read and replaced, and actors and critics of different widths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resume_cases import SPECS, tiny
from rl_training import DQN, PPO, SAC
from rl_training.api.algorithms import managed_class
from rl_training.config.replay_params import RESIDUAL
from rl_training.errors import UserError
from rl_training.run.learner import load_algorithm, read_checkpoint

OBS = np.array([[0.1, 0.2, -0.3, 0.4], [1.0, -2.0, 0.5, -0.5]], np.float32)


def trained(algo: Any, tmp_path: Path, **kwargs: Any) -> Any:
    made = algo(tiny(algo.algo, tmp_path, kwargs=kwargs))
    made.learn(progress=False)
    return made


def test_parameters_come_back_as_they_were_set(tmp_path: Path) -> None:
    one, other = (trained(PPO, tmp_path / name) for name in "ab")
    before = one.get_parameters()
    assert {"policy.actor.0.weight", "policy.critic.2.bias"} <= set(before)
    assert not [name for name in before if name.startswith("optimizer")]
    changed = {name: value + 0.5 for name, value in before.items() if "actor" in name}
    one.set_parameters(changed)
    after = one.get_parameters()
    for name, value in before.items():
        torch.testing.assert_close(after[name], changed.get(name, value), rtol=0, atol=0)
    other.set_parameters({name: value.numpy() for name, value in after.items()})  # arrays will do
    assert one.evaluate(2, seed=1) == other.evaluate(2, seed=1)
    before["policy.actor.0.weight"].zero_()  # a copy
    assert one.get_parameters()["policy.actor.0.weight"].abs().sum() > 0


def test_learning_goes_on_from_the_parameters_that_were_set(tmp_path: Path) -> None:
    sac = trained(SAC, tmp_path / "runs", learning_rate=0.0)
    first = {path.name for path in (tmp_path / "runs").iterdir()}
    names = [name for name in sac.get_parameters() if name.startswith("target_critics.")]
    assert names
    sac.set_parameters({name: torch.full_like(value, 0.25) for name, value in sac.get_parameters().items()})
    result = sac.learn(64, progress=False)
    assert result.run_dir.name not in first  # the first run stays as it was
    (old,) = first
    assert (tmp_path / "runs" / old / "checkpoints" / "latest.ckpt").is_file()
    for name, value in sac.get_parameters().items():
        if name.startswith(("model.", "target_critics.")):
            assert value.eq(0.25).all(), name


def test_a_saved_file_has_them(tmp_path: Path) -> None:
    dqn = trained(DQN, tmp_path / "runs")
    head = {name: torch.zeros_like(value) for name, value in dqn.get_parameters().items() if "q_network.head" in name}
    bias = next(name for name in head if name.endswith("bias"))
    for favoured in (0, 1):
        dqn.set_parameters(head | {bias: torch.eye(2)[favoured]})
        assert dqn.predict(OBS).tolist() == [favoured] * 2
        path = dqn.save(tmp_path / f"{favoured}.ckpt")
        assert DQN.load(path).predict(OBS).tolist() == [favoured] * 2


def test_what_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to set the parameters of yet; call learn"):
        PPO("CartPole-v1").set_parameters({})
    ppo = trained(PPO, tmp_path)
    for given, sentence in (
        ({"policy.actor.0.weigth": 0}, "no parameter 'policy.actor.0.weigth'; did you mean 'policy.actor.0.weight'"),
        ({"policy.actor.0.bias": [1.0]}, r"policy.actor.0.bias has the shape \(1,\); it must be \(8,\)"),
        ({"policy.actor.0.bias": [float("nan")] * 8}, "holds a value that is not finite"),
        ({"policy.actor.0.bias": "zeros"}, "is 'zeros'; it must be a tensor or an array"),
        ("policy.zip", r"load\(path\) reads a file"),
    ):
        with pytest.raises(UserError, match=sentence):
            ppo.set_parameters(given)
    policy = PPO.load(ppo.save(tmp_path / "p.ckpt", policy_only=True))
    with pytest.raises(UserError, match="this is a policy file, which only acts"):
        policy.set_parameters(policy.get_parameters())
    with pytest.raises(UserError, match="no argument 'action_masks'; action_mask takes them"):
        ppo.predict(OBS, action_masks=[[1, 0]])


HAS_CRITICS = [name for name, spec in SPECS.items() if "critic_hidden_sizes" in spec.params.model_fields]


@pytest.mark.parametrize("algo", HAS_CRITICS)
def test_actor_and_critics_may_have_different_widths(algo: str, tmp_path: Path) -> None:
    managed, fields = managed_class(SPECS[algo].class_name), SPECS[algo].params.model_fields
    has_blocks = "architecture" in fields and fields["architecture"].default in RESIDUAL  # of one width
    sizes = [11, 11] if has_blocks else [11, 9]
    made = trained(managed, tmp_path, hidden_sizes=[13], critic_hidden_sizes=sizes)
    found = made.get_parameters()
    widths = {"actor": set[int](), "critic": set[int]()}
    for name, value in found.items():
        kind = next((kind for kind in widths if f"{kind}." in name or f"{kind}s." in name), None)
        if kind and value.dim() > 1:
            widths[kind] |= set(value.shape[-2:])
    assert 13 in widths["actor"]
    assert not widths["actor"] & {11, 9}
    assert {*sizes} <= widths["critic"]
    assert 13 not in widths["critic"]
    path = made.save(tmp_path / "all.ckpt")
    again, _, _ = load_algorithm(path, read_checkpoint(path))
    assert again.state_dict().keys() == made._loaded().algorithm.state_dict().keys()
