"""A run folder or a working directory of somebody else: its links, pipes and git settings have no effect outside it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from resume_cases import StopAt, tiny
from rl_training.cli.main import app
from rl_training.errors import TrainingFailure, UserError
from rl_training.record.checkpoints import load_checkpoint
from rl_training.run import folder as run_folder
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import resume_training, train
from rl_training.safe_files import replacing, write_text

WRITTEN = ("config.yaml", "manifest.json", "metrics.jsonl", "end.json", ".lock", ".metrics.jsonl.tmp")
OUTPUTS = ("latest.onnx", "latest.onnx.json", "latest.onnx.md", ".part-latest.onnx", "latest.pt2", "latest.pt2.json",
           ".part-latest.pt2", "imagined.png", "imagined.gif")  # fmt: skip


@pytest.fixture(scope="module")
def origins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run folders: a stopped PPO run, and a finished Dreamer."""
    folder = tmp_path_factory.mktemp("runs")
    ppo = train(tiny("ppo", folder), callbacks=[StopAt(64)], console=False)
    return {"ppo": ppo.run_dir, "dreamer": train(tiny("dreamer", folder, env_id="Pendulum-v1"), console=False).run_dir}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of the user, which nothing may change."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "precious").write_text("mine")
    return folder


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Inode and bytes of every file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_ino, path.read_bytes()) for path in files}


def invoke(*words: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(*words: Any) -> str:
    result = invoke(*words)
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return str(lines[0])


def with_links(origin: Path, outside: Path, names: tuple[str, ...]) -> Path:
    """A copy of a run in which these names are links to a file of the user; the contents of a file are kept there."""
    run = Path(shutil.copytree(origin, outside.parent / "stranger"))
    for name in names:
        path, target = run / name, outside / name.replace("/", "_")
        if path.is_file():
            path.rename(target)
        elif not name.endswith("nothing"):
            target.write_text("mine")
        path.symlink_to(target)
    return run


# ---- links ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*WRITTEN, "checkpoints/latest.ckpt", "checkpoints/best.ckpt"])
def test_resume_never_writes_through_a_link(name: str, origins: dict[str, Path], outside: Path) -> None:
    run = with_links(origins["ppo"], outside, (name,))
    before = contents(outside)
    result = invoke("resume", "--checkpoint", run)
    assert contents(outside) == before
    if name == ".lock":
        assert result.exit_code == 2, result.output
        return
    assert result.exit_code == 0, result.output
    assert load_checkpoint(run / "checkpoints" / "latest.ckpt")["run"]["step"] > 64
    assert not list(Path().iterdir())  # it went on in its own folder


@pytest.mark.parametrize("name", ["metrics.jsonl", "end.json", ".lock"])
def test_resume_never_writes_to_a_file_that_has_another_name(
    name: str, origins: dict[str, Path], outside: Path
) -> None:
    run = Path(shutil.copytree(origins["ppo"], outside.parent / "stranger"))
    (run / name).unlink(missing_ok=True)
    os.link(outside / "precious", run / name)
    before = contents(outside)
    assert invoke("resume", "--checkpoint", run).exit_code == (2 if name == ".lock" else 0)
    assert contents(outside) == before


def test_a_link_to_nothing_makes_no_file(origins: dict[str, Path], outside: Path) -> None:
    run = Path(shutil.copytree(origins["ppo"], outside.parent / "stranger"))
    for name in ("metrics.jsonl", "end.json"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside / name)
    before = contents(outside)
    assert invoke("resume", "--checkpoint", run).exit_code == 0
    assert contents(outside) == before


@pytest.mark.parametrize("name", ["checkpoints", "wandb"])
def test_resume_refuses_a_link_in_place_of_a_folder(name: str, origins: dict[str, Path], outside: Path) -> None:
    run = Path(shutil.copytree(origins["ppo"], outside.parent / "stranger"))
    target = outside / name
    if (run / name).exists():
        (run / name).rename(target)
    else:
        target.mkdir()
    (target / "step_1.ckpt").write_text("mine")
    (run / name).symlink_to(target)
    before = contents(outside)
    assert "is a link, and nothing is written through links" in refused("resume", "--checkpoint", run)
    assert contents(outside) == before
    assert invoke("resume", "--checkpoint", run, "--output-dir", "new").exit_code == 0
    assert contents(outside) == before


def test_a_link_to_a_checkpoint_of_another_run_does_not_continue_that_run(
    origins: dict[str, Path], outside: Path
) -> None:
    own = Path(shutil.copytree(origins["ppo"], outside / "own"))
    run = with_links(origins["ppo"], outside, ())
    (run / "checkpoints" / "latest.ckpt").unlink()
    (run / "checkpoints" / "latest.ckpt").symlink_to(own / "checkpoints" / "latest.ckpt")
    before = contents(outside)
    assert invoke("resume", "--checkpoint", run).exit_code == 0
    assert contents(outside) == before


@pytest.mark.parametrize("algo", ["ppo", "dreamer"])
def test_eval_report_plot_and_compare_never_write_through_a_link(
    algo: str, origins: dict[str, Path], outside: Path
) -> None:
    names = ("report.html", "curves.svg", *(f"checkpoints/{name}" for name in OUTPUTS))
    run = with_links(origins[algo], outside, names)
    before = contents(outside)
    imagine = ["--imagine"] if algo == "dreamer" else []
    done = invoke("eval", "--checkpoint", run, "--num-episodes", 1, *imagine)
    assert done.exit_code == 0, done.output
    assert invoke("report", run, "--no-episode", "--output", run / "report.html").exit_code == 0
    invoke("plot", run, "--output", run / "curves.svg")
    invoke("compare", run)
    assert contents(outside) == before
    assert not (run / "report.html").is_symlink()


@pytest.mark.parametrize("form", ["torch", pytest.param("onnx", marks=pytest.mark.slow)])
def test_export_never_writes_through_a_link(form: str, origins: dict[str, Path], outside: Path) -> None:
    run = with_links(origins["ppo"], outside, tuple(f"checkpoints/{name}" for name in OUTPUTS))
    before = contents(outside)
    done = invoke("export", "--checkpoint", run, "--format", form, "--card", "--num-episodes", 2)
    assert done.exit_code == 0, done.output
    assert contents(outside) == before
    (run / "checkpoints").rename(outside / "checkpoints")
    (run / "checkpoints").symlink_to(outside / "checkpoints")
    before = contents(outside)
    assert "is a link" in refused("export", "--checkpoint", run, "--format", form)
    assert contents(outside) == before


def test_data_sets_and_studies_never_write_through_a_link(origins: dict[str, Path], outside: Path) -> None:
    for name in ("data.npz", "study/study.db"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).symlink_to(outside / "precious")
    before = contents(outside)
    collected = invoke("dataset", "collect", "--env", "CartPole-v1", "--random", "--num-steps", 5, "--output", "data")
    assert collected.exit_code == 0, collected.output
    said = refused("tune", "--config", "ppo/cartpole", "--trials", 1, "--study", "study")
    assert "study.db is a link" in said
    assert contents(outside) == before


def test_videos_are_not_written_through_a_link(origins: dict[str, Path], outside: Path) -> None:
    Path("videos").mkdir()
    Path("videos/rl-video-episode-0.mp4").symlink_to(outside / "precious")
    said = refused("eval", "--checkpoint", origins["ppo"], "--record-video", "videos")
    assert "rl-video-episode-0.mp4 is a link, and nothing is written through links" in said
    assert (outside / "precious").read_text() == "mine"


def test_a_temporary_file_has_a_name_that_nobody_can_guess(tmp_path: Path) -> None:
    names = set()
    for _ in range(2):
        with replacing(tmp_path / "file") as file:
            names |= {path.name for path in tmp_path.glob(".file.*.tmp")}
            file.write(b"new")
    assert len(names) == 2
    assert (tmp_path / "file").read_bytes() == b"new"
    assert not list(tmp_path.glob(".*"))


def test_a_file_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "old")
    with pytest.raises(TypeError), replacing(tmp_path / "file") as file:
        file.write("text")
    assert (tmp_path / "file").read_text() == "old"
    assert not list(tmp_path.glob(".*"))


# ---- pipes and devices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*WRITTEN, "checkpoints/latest.ckpt", "report.html"])
def test_a_pipe_in_place_of_a_file_stops_nothing(name: str, origins: dict[str, Path], tmp_path: Path) -> None:
    run = Path(shutil.copytree(origins["ppo"], tmp_path / "stranger"))
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    checkpoint = run if "latest" not in name else run / name
    result = invoke("resume", "--checkpoint", checkpoint, "--output-dir", "out")  # branches: copies the metrics
    assert result.exit_code == (2 if "latest" in name else 0), result.output
    result = invoke("resume", "--checkpoint", checkpoint)
    assert result.exit_code in (0, 2), result.output
    assert invoke("report", run, "--no-episode", "--output", run / "report.html").exit_code in (0, 2)


@pytest.mark.parametrize("name", ["end.json", "metrics.jsonl", ".lock"])
def test_a_folder_in_place_of_a_file_is_one_sentence(name: str, origins: dict[str, Path], tmp_path: Path) -> None:
    run = Path(shutil.copytree(origins["ppo"], tmp_path / "stranger"))
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    result = invoke("resume", "--checkpoint", run)
    assert result.exit_code == 2, result.output
    assert "Is a directory" in result.stderr


# ---- the lock of a deleted folder -----------------------------------------------------------------------------------


class Delete(Callback):
    """Deletes the run's folder; then somebody else puts a copy there and resumes it."""

    def __init__(self, backup: Path | None) -> None:
        self.backup, self.descriptor = backup, -1

    def on_update(self, run: Run) -> None:
        if run.step == 64 and self.descriptor < 0:
            shutil.rmtree(run.run_dir)
            if self.backup is None:
                self.descriptor = 0
                return
            shutil.copytree(self.backup, run.run_dir)
            self.descriptor = run_folder._take_lock(run.run_dir / ".lock")


@pytest.mark.filterwarnings("ignore:.*(was deleted|written)")
def test_a_run_whose_folder_was_deleted_stops_when_another_run_has_it(
    origins: dict[str, Path], tmp_path: Path
) -> None:
    other = Delete(origins["ppo"])
    with pytest.raises(TrainingFailure, match=r"this run lost its folder.*in use"):
        train(tiny("ppo", tmp_path, name="x", checkpoint_interval=16), callbacks=[other], console=False)
    os.close(other.descriptor)
    found = {name: data for name, (_, data) in contents(tmp_path / "x").items()}
    assert found.pop(".lock")  # of the other run, which it did not remove
    for name, (_, data) in contents(origins["ppo"]).items():
        assert found[name] == data, name


def test_a_run_whose_folder_was_deleted_locks_the_new_one(tmp_path: Path) -> None:
    refusals = []

    class Resume(Callback):
        def on_update(self, run: Run) -> None:
            if run.step == 96:
                with pytest.raises(UserError, match="is in use") as caught:
                    resume_training(run.checkpoints.latest, console=False)
                refusals.append(caught)

    with pytest.warns(UserWarning, match="was deleted; a new one is started"):
        result = train(
            tiny("ppo", tmp_path, checkpoint_interval=16), callbacks=[Delete(None), Resume()], console=False
        )
    assert len(refusals) == 1
    assert not (result.run_dir / ".lock").exists()


# ---- the working directory ------------------------------------------------------------------------------------------


def git(*words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_git_settings_of_the_working_directory_run_nothing(tmp_path: Path) -> None:
    git("init", "-q", ".")
    Path("file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    git("config", "core.fsmonitor", f"touch {tmp_path / 'canary'};")
    train(tiny("ppo", Path("runs")), console=False)
    assert run_folder.git_state() == {"commit": commit}
    assert not (tmp_path / "canary").exists()


def test_the_commit_is_read_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_folder.git_state() is None
    git("init", "-q", ".")
    assert run_folder.git_state() is None  # no commit yet
    Path("file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "one")
    first = {"commit": git("rev-parse", "HEAD")}
    assert run_folder.git_state() == first
    git("pack-refs", "--all")
    assert run_folder.git_state() == first
    Path("below").mkdir()
    monkeypatch.chdir("below")
    assert run_folder.git_state() == first
    git("worktree", "add", "-q", str(tmp_path / "tree"))
    git("commit", "-q", "--allow-empty", "-m", "two")
    assert run_folder.git_state() == {"commit": git("rev-parse", "HEAD")} != first
    git("checkout", "-q", "--detach")
    assert run_folder.git_state() == {"commit": git("rev-parse", "HEAD")}
    monkeypatch.chdir(tmp_path / "tree")
    assert run_folder.git_state() == first


@pytest.mark.parametrize("head", ["ref: refs/heads/none", "ref: ../../secret", "ref: HEAD", "", "x" * 10_000, "pipe"])
def test_a_damaged_repository_has_no_commit(head: str) -> None:
    Path(".git").mkdir()
    Path("secret").write_text("a password")
    if head == "pipe":
        os.mkfifo(".git/HEAD")
    else:
        Path(".git/HEAD").write_text(head)
    assert run_folder.git_state() is None
