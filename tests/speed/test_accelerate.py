"""`accelerate`: what it is where nobody says, what is refused, and that every learner learns the same with it."""

from __future__ import annotations

import copy
import gc
import pickle
import shutil
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from recorded_steps import Recorded, RecordedOnHost, Replayed
from resume_cases import SPECS, assert_same, rows_of, stop_and_resume, take_steps, tiny
from rl_training.algorithms.base import Algorithm, Numbers
from rl_training.algorithms.dreamer import Dreamer
from rl_training.collect import local
from rl_training.collect.local import Behaviour
from rl_training.config import choices
from rl_training.config.choices import choose_acceleration
from rl_training.errors import UserError
from rl_training.models import mlp_fqf_network, mlp_q_network
from rl_training.models.memory import Memory
from rl_training.record.checkpoints import load_checkpoint
from rl_training.run import learner as acting
from rl_training.run.build import fit_ranks, open_session
from rl_training.run.learner import ActingSession
from rl_training.run.restoring import change_config
from rl_training.run.workflows import resume_training, train
from rl_training.speed import capture, passes
from rl_training.speed.capture import map_tensors
from rl_training.speed.optimizer import Optimizer, TargetNetwork

BY_LEARNER = sorted({(spec.learner, name == "r2d2"): name for name, spec in SPECS.items()}.values())  # has a memory
UPDATES = 9
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on the CPU are captured, in Python."""
    monkeypatch.setattr(capture, "CAPTURING", ("cpu",))
    monkeypatch.setattr(capture, "CapturedStep", Recorded)
    monkeypatch.setattr(local, "HostStep", RecordedOnHost)
    for module in (passes, mlp_fqf_network):  # on a GPU, there is no numpy inside of a step
        monkeypatch.setattr(module, "runs_written_out", lambda x: False)
    monkeypatch.setattr(Memory, "forward", lambda memory, x, recall: memory.follow(x, recall)[0])  # nor a host's read


def learn(algo: str, *, moves: bool, accelerates: bool, device: str = "cpu", **kwargs: Any) -> Algorithm:
    """A learner after some updates, in which a schedule moves every number that it may."""
    kwargs |= {"gradient_penalty": 1.0} if algo == "gail" else {}
    session = open_session(tiny(algo, Path("unused"), threads=1, device=device, accelerate="none", kwargs=kwargs))
    algorithm, store = session.algorithm, session.store
    if accelerates:
        algorithm.accelerate("graph")
    start, table = dict(algorithm.numbers), algorithm.numbers
    step = updates = 0
    while updates < UPDATES:
        step += take_steps(session, step)
        for phase, batch in store.batches(algorithm, step):
            for name, value in start.items():
                if moves and value and table.read.get(name, "in place") == "in place":
                    algorithm.set_number(name, value * (1.0 - 0.05 * updates))
            store.feedback(batch, algorithm.update(batch, phase=phase, global_step=step, sync=False))
            updates += phase == "policy"
    session.close()
    return algorithm


def tensors_of(algorithm: Algorithm) -> dict[str, Tensor]:
    return dict([*algorithm.named_parameters(), *algorithm.named_buffers()])


@pytest.mark.usefixtures("fake_graphs")
@pytest.mark.parametrize("algo", [*BY_LEARNER, "crossq", "simba", "simbav2", "flash_sac"])
def test_captured_steps_learn_what_plain_ones_learn(algo: str) -> None:
    plain, captured = (learn(algo, moves=False, accelerates=accelerates) for accelerates in (False, True))
    for name, tensor in tensors_of(plain).items():
        assert torch.equal(tensor, tensors_of(captured)[name]), name
    learners: list[Any] = [module for module in captured.modules() if isinstance(module, Algorithm)]
    steps = [getattr(learner, name) for learner in learners for name in learner.graphs or learner.steps]
    assert steps
    assert all(sum(step.replays) for step in steps)


@pytest.mark.usefixtures("fake_graphs")
@pytest.mark.parametrize("algo", ["redq", "rlpd"])
def test_captured_updates_draw_subsets_and_dropout_like_plain_ones(algo: str) -> None:
    axes = {"num_critics": 4, "critic_dropout": 0.2, "gradient_updates_per_step": 2}
    plain: Any
    captured: Any
    plain, captured = (learn(algo, moves=False, accelerates=given, **axes) for given in (False, True))
    for name, tensor in tensors_of(plain).items():
        assert torch.equal(tensor, tensors_of(captured)[name]), name
    assert torch.equal(plain.generator.get_state(), captured.generator.get_state())
    assert len(captured.update_step.replays) == 2  # with a step of the actor and without


@pytest.mark.usefixtures("fake_graphs")
def test_captured_steps_adapt_the_learning_rate_like_plain_ones() -> None:
    plain, captured = (learn("ppo", moves=False, accelerates=given, desired_kl=1e-4) for given in (False, True))
    for name, tensor in tensors_of(plain).items():
        assert torch.equal(tensor, tensors_of(captured)[name]), name
    assert sum(getattr(captured, captured.graphs[0]).replays)
    assert float(tensors_of(captured)["rate"]) != pytest.approx(3e-4)


@pytest.mark.usefixtures("fake_graphs")
@pytest.mark.parametrize("algo", BY_LEARNER)
def test_captured_steps_read_numbers_that_move(algo: str) -> None:
    plain, captured = (learn(algo, moves=True, accelerates=accelerates) for accelerates in (False, True))
    for name, tensor in tensors_of(plain).items():
        torch.testing.assert_close(tensors_of(captured)[name], tensor, rtol=1e-3, atol=1e-5)
    names = captured.graphs or captured.steps
    assert all(sum(getattr(captured, name).replays) for name in names)  # they make no other signature


def record_inputs(algo: str) -> tuple[Algorithm, dict[tuple[Algorithm, str], tuple[Any, ...]]]:
    """A learner that has learned until each of its steps was called, and what each was first called with."""
    kwargs = {"gradient_penalty": 1.0} if algo == "gail" else {}
    session = open_session(tiny(algo, Path("unused"), threads=1, kwargs=kwargs))
    algorithm, store, step = session.algorithm, session.store, 0
    calls: dict[tuple[Algorithm, str], tuple[Any, ...]] = {}
    learners = [module for module in algorithm.modules() if isinstance(module, Algorithm)]
    steps = [(learner, name) for learner in learners for name in learner.steps]
    for key in steps:

        def record(*inputs: Any, key: Any = key, function: Any = getattr(*key)) -> Any:
            calls.setdefault(key, inputs)
            return function(*inputs)

        setattr(*key, record)
    while len(calls) < len(steps):
        step += take_steps(session, step)
        for phase, batch in store.batches(algorithm, step):
            store.feedback(batch, algorithm.update(batch, phase=phase, global_step=step, sync=False))
    session.close()
    for key in steps:
        delattr(*key)
    return algorithm, calls


@pytest.mark.parametrize("algo", BY_LEARNER)
def test_no_step_looks_at_a_tensor(algo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, where tensors hold nothing to look at; a GPU would wait, and end a capture."""
    algorithm, calls = record_inputs(algo)
    monkeypatch.setattr(torch.__future__, "get_swap_module_params_on_conversion", lambda: True)
    monkeypatch.delattr(Algorithm, "_apply")  # which refuses
    algorithm.to("meta")
    monkeypatch.setattr(Optimizer, "_move", lambda self, grad: None)  # fused kernels have no meta form
    monkeypatch.setattr(TargetNetwork, "polyak_", lambda self, tau: None)
    monkeypatch.setattr(Dreamer, "_autocast", lambda self: nullcontext())
    for module in algorithm.modules():
        if isinstance(module, Optimizer):
            module.flat, module._one = module.flat.to("meta"), module._one.to("meta")
        if isinstance(module, Algorithm):
            module.numbers.device = torch.device("meta")
            module.numbers.update({name: value for name, value in module.numbers.items() if value is not None})
    for (learner, name), inputs in calls.items():
        getattr(learner, name)(*map_tensors(lambda tensor: tensor.detach().to("meta"), inputs))
    assert calls


def explore(algo: str, *, accelerates: bool, device: str = "cpu") -> tuple[Behaviour, list[Any]]:
    """A behaviour that has acted in torch for some steps while its exploration fades, and its actions."""
    session = open_session(tiny(algo, Path("unused"), threads=1, device=device, accelerate="none"))
    algorithm, spaces = session.algorithm, session.spaces
    if accelerates:
        algorithm.accelerate("graph")
    acts = Behaviour(algorithm, spaces, 1, np.random.default_rng(0))
    acts.numpy_policy = None
    obs, first = np.ones((1, *spaces.obs_shape), np.float32), np.zeros(1, bool)
    actions = []
    for step in range(8):
        for name in [name for name in algorithm.numbers if algorithm.numbers.read.get(name) == "to act"]:
            algorithm.set_number(name, 0.9 - 0.1 * step)
        actions.append(acts.act(obs, None, first)[0])
    session.close()
    return acts, actions


@pytest.mark.usefixtures("fake_graphs")
@pytest.mark.parametrize("algo", ["dqn", "noisy_dqn", "iqn", "td3", "sac", "discrete_sac", "ppo", "pqn", "dreamer"])
def test_exploring_is_a_step_with_the_draws_of_plain_calls(algo: str) -> None:
    (_, plain), (captured, actions) = (explore(algo, accelerates=accelerates) for accelerates in (False, True))
    assert np.array_equal(plain, actions)
    step: Any = captured._explore
    numbers = captured.algorithm.numbers
    fades = "to act" in [numbers.read.get(name) for name in numbers]  # on a CPU, each value has another graph
    assert (sum(step.replays), step.plain) == ((0, 8) if fades else (5, 3))


def test_a_session_that_ends_frees_its_graphs_at_once() -> None:
    algorithm = learn("sac", moves=False, accelerates=False)
    session = ActingSession(algorithm, 1, seed=0)
    step = weakref.ref(session._step)
    gc.disable()  # which collects seldom: each evaluation on a GPU would leave its memory behind
    try:
        del session
        assert step() is None
    finally:
        gc.enable()


COPIES = [copy.deepcopy, lambda learner: pickle.loads(pickle.dumps(learner))]


@pytest.mark.usefixtures("fake_graphs")
@pytest.mark.parametrize("algo", BY_LEARNER)
def test_a_copy_of_a_learner_learns_what_the_original_learns(algo: str) -> None:
    session = open_session(tiny(algo, Path("unused"), threads=1))
    algorithm, step, seen = session.algorithm, 0, 0
    algorithm.accelerate("graph")
    while seen < 2:
        step += take_steps(session, step)
        for phase, batch in session.store.batches(algorithm, step):
            algorithm.update(batch, phase=phase, global_step=step)
            seen += phase == "policy"
    session.close()
    copies = [duplicate(algorithm) for duplicate in COPIES]
    before = {name: tensor.clone() for name, tensor in tensors_of(algorithm).items()}
    for learner in (algorithm, *copies):
        for _ in range(3):
            learner.update({name: tensor.clone() for name, tensor in batch.items()}, global_step=step)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in algorithm.named_parameters())
    for twin in copies:
        assert repr(twin.numbers) == repr(algorithm.numbers)  # floats
        for name, tensor in tensors_of(algorithm).items():
            assert torch.equal(tensor, tensors_of(twin)[name]), name


@pytest.mark.usefixtures("fake_graphs")
@pytest.mark.parametrize("duplicate", COPIES)
def test_a_copy_of_a_learner_has_no_graphs_of_the_original(duplicate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: Any, protocol: int) -> Any:
        raise TypeError("cannot pickle 'torch._C._CUDAGraph' object")

    monkeypatch.setattr(Replayed, "__reduce_ex__", refuse)
    captured: Any = learn("ppo", moves=True, accelerates=True)
    copied = duplicate(captured)
    name = captured.graphs[0]
    assert sum(getattr(captured, name).replays)
    assert not getattr(copied, name).replays
    assert getattr(copied, name).function.__self__ is copied


@NEEDS_GPU
@pytest.mark.parametrize("algo", BY_LEARNER)
def test_a_graph_explores_with_the_draws_of_plain_calls_on_a_gpu(algo: str) -> None:
    (plain, actions), (captured, others) = (explore(algo, accelerates=on, device="cuda") for on in (False, True))
    np.testing.assert_allclose(np.stack(actions), np.stack(others), rtol=1e-4, atol=1e-5)
    states = [acts.algorithm.generator.get_state() for acts in (plain, captured)]
    assert torch.equal(*states)
    assert len(captured._explore._graphs) == 1


@NEEDS_GPU
@pytest.mark.parametrize("algo", BY_LEARNER)
def test_graphs_learn_what_plain_calls_learn_on_a_gpu(algo: str) -> None:
    plain, captured = (learn(algo, moves=True, accelerates=on, device="cuda") for on in (False, True))
    for name, tensor in tensors_of(plain).items():
        torch.testing.assert_close(tensors_of(captured)[name], tensor, rtol=1e-2, atol=1e-4)


@pytest.mark.usefixtures("fake_graphs")
@pytest.mark.parametrize("algo", ["dqn", "noisy_dqn", "td3", "ppo", pytest.param("dreamer", marks=pytest.mark.slow)])
def test_a_run_that_acts_learns_and_evaluates_by_graphs_is_the_run_without(
    algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Any] = []

    class Kept(RecordedOnHost):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            steps.append(self)

    for module in (passes, mlp_q_network):  # a GPU acts in torch
        monkeypatch.setattr(module, "linear_step", lambda *_: None)
    monkeypatch.setattr(Numbers, "_stays_float", lambda self, name, _: self.read.get(name) in ("by value", "never"))
    for module in (local, acting):
        monkeypatch.setattr(module, "HostStep", Kept)

    def config(name: str) -> Any:
        fades = {"learning_rate_schedule": {"start": 1e-3, "end": 1e-4}}
        return tiny(algo, tmp_path / name, threads=1, eval_episodes=1, kwargs=fades | {"eval_interval": 50})

    monkeypatch.setattr(choices, "choose_acceleration", lambda *_: "graph")
    results = [train(config("graphs"), console=False), stop_and_resume(config("parts"), 60)]
    assert {step.function.__name__ for step in steps if step.replays} == {"explore", "decide"}
    steps.clear()
    monkeypatch.setattr(capture, "CAPTURING", ())
    results.append(train(config("plain"), console=False))
    assert steps
    assert not any(step.replays for step in steps)
    states = [load_checkpoint(result.checkpoint_path) for result in results]
    for state in states[1:]:
        assert_same([states[0]["algorithm"], states[0]["source"]], [state["algorithm"], state["source"]])
    assert_same(rows_of(results[0].run_dir), rows_of(results[2].run_dir))


@NEEDS_GPU
@pytest.mark.parametrize("algo", ["dqn", "rainbow_dqn", "td3", "sac", "ppo", "dreamer"])
def test_a_run_on_a_gpu_resumes_exactly_and_learns_what_plain_calls_learn(algo: str, tmp_path: Path) -> None:
    def config(name: str, how: str) -> Any:
        return tiny(algo, tmp_path / name, eval_episodes=0, device="cuda", accelerate=how)

    whole, plain = (train(config(how, how), console=False) for how in ("graph", "none"))
    results = whole, stop_and_resume(config("parts", "graph"), 60), plain
    states = [load_checkpoint(result.checkpoint_path)["algorithm"] for result in results]
    assert_same(*states[:2])
    for name, value in states[2].items():
        if isinstance(value, Tensor) and value.is_floating_point():
            torch.testing.assert_close(states[0][name], value, rtol=1e-3, atol=1e-4)


# what it is -----------------------------------------------------------------------------------------------------------

CASES = [
    ("auto", "cpu", "none"), ("auto", "cuda", "graph"), ("auto", "cuda:1", "graph"), ("none", "cuda", "none"),
    ("graph", "cuda", "graph"), ("compile", "cpu", "compile"), ("compile", "cuda", "compile"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "device", "found"), CASES)
def test_graphs_are_for_a_gpu_and_compiling_for_whoever_asks(
    asked: str, device: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    config = tiny("ppo", Path("unused"), accelerate=asked)
    assert choose_acceleration(config, SPECS["ppo"].params(), device) == found


def test_what_cannot_be_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/clang++" if name == "clang++" else None)

    def refusal(asked: str, algo: str = "ppo", device: str = "cpu", **kwargs: Any) -> str:
        config = tiny(algo, Path("unused"), accelerate=asked)
        with pytest.raises(UserError) as refused:
            choose_acceleration(config, SPECS[algo].params(**kwargs), device)
        return str(refused.value)

    wanted = "it must be auto, none or compile."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal("graph") == f"accelerate is 'graph', but torch sees no GPU here; {wanted}"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert refusal("graph") == f"accelerate is 'graph', but device is 'cpu'; {wanted}"
    wanted = "accelerate is 'compile', but its C++ compiler {} is not found; install it, name another in CXX, or "
    monkeypatch.setattr("sys.platform", "linux")
    assert refusal("compile").startswith(wanted.format("'g++'"))  # torch tries no other, whatever else is there
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert refusal("compile").startswith(wanted.format("'/nowhere/c++'"))
    without = "accelerate is 'graph', but dreamer has no steps for it; it must be auto or none."
    assert refusal("graph", "dreamer", "cuda", capture=False) == without


def test_the_memory_of_a_gpu_is_refused_to_a_new_run_without_one(tmp_path: Path) -> None:
    wanted = "replay_memory is 'device', but device is 'cpu'; there it must be auto or host."
    for device in ("cpu", "auto"):
        with pytest.raises(UserError, match=wanted):
            train(tiny("dqn", tmp_path, device=device, kwargs={"replay_memory": "device"}), console=False)
    assert not list(tmp_path.iterdir())
    done = train(tiny("dqn", tmp_path, eval_episodes=0), console=False)  # a run that began on a GPU continues here
    changes = {"algo_kwargs": {"replay_memory": "device"}}
    assert resume_training(done.checkpoint_path, total_timesteps=160, changes=changes).metrics["global_step"] == 160


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="device is 'cuda:2', but the last GPU here is 'cuda:1'; use that"):
        open_session(tiny("ppo", Path("unused"), device="cuda:2"))


def test_several_learners_run_plainly() -> None:
    assert fit_ranks(tiny("ppo", Path("unused")), "rollout").accelerate == "none"
    several = r"accelerate is 'graph'; with several learners \(torchrun\) it must be auto or none."
    with pytest.raises(UserError, match=several):
        fit_ranks(tiny("ppo", Path("unused"), accelerate="graph"), "rollout")


@pytest.mark.usefixtures("fake_graphs")
def test_a_run_keeps_and_says_what_was_chosen_and_its_resume_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_training.config.choices.choose_acceleration", lambda config, *_: {"auto": "graph"}.get(
        config.accelerate, config.accelerate))  # fmt: skip
    settings: dict[str, Any] = {"eval_episodes": 0}
    settings["kwargs"] = {"learning_rate_schedule": {"type": "linear", "start": 1e-3, "end": 0.0}}
    whole = train(tiny("trpo", tmp_path / "whole", eval_episodes=0), console=False)
    assert yaml.safe_load((whole.run_dir / "config.yaml").read_text())["accelerate"] == "graph"
    said = "accelerate auto is graph: each gradient step is captured once as a CUDA graph and replayed, but not the"
    assert said in (whole.run_dir / "manifest.json").read_text()
    whole = train(tiny("sac", tmp_path / "one", **settings), console=False)
    resumed = stop_and_resume(tiny("sac", tmp_path / "two", **settings), 60)
    assert yaml.safe_load((resumed.run_dir / "config.yaml").read_text())["accelerate"] == "graph"
    assert_same(*(load_checkpoint(result.checkpoint_path)["algorithm"] for result in (whole, resumed)))


def test_products_and_convolutions_are_set_for_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", said.append)
    open_session(tiny("ppo", Path("unused"), matmul_precision="high")).close()
    assert (said, torch.backends.cudnn.deterministic) == ([], False)
    monkeypatch.setattr("rl_training.run.build.build_algorithm", lambda *_, **__: pytest.fail("not so far"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(pytest.fail.Exception, match="not so far"):
        open_session(tiny("ppo", Path("unused"), matmul_precision="high", device="cuda"))
    assert (said, torch.backends.cudnn.deterministic) == (["high"], True)


def test_a_run_that_goes_on_on_another_device_chooses_again() -> None:
    stored = tiny("ppo", Path("unused"), device="cuda", accelerate="graph")
    for wanted, found in (({"device": "cpu"}, "auto"), ({"device": "cuda"}, "graph"), ({}, "graph")):
        assert change_config(stored, wanted, force=True)[0].accelerate == found
    assert change_config(stored, {"device": "cpu", "accelerate": "none"}, force=True)[0].accelerate == "none"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("algo", ["ppo", "dqn", "sac"])
def test_compiled_steps_learn_what_plain_ones_learn(algo: str, tmp_path: Path) -> None:
    runs = [train(tiny(algo, tmp_path / how, eval_episodes=0, accelerate=how), console=False)
            for how in ("none", "compile")]  # fmt: skip
    plain, compiled = (load_checkpoint(run.checkpoint_path)["algorithm"] for run in runs)
    for name, value in plain.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            torch.testing.assert_close(compiled[name], value, rtol=1e-3, atol=1e-4)
