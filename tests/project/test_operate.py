"""The files and commands of docs/operate.md."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from rl_training.cli.main import app

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
PAGE = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "STOPSIGNAL", "ENTRYPOINT", "CMD"}


@pytest.mark.parametrize(
    ("file", "page"), [("train.slurm", "continue"), ("cartpole.service", "continue"), ("Dockerfile", "operate")]
)
def test_a_page_prints_the_file_as_it_is(file: str, page: str) -> None:
    assert (CLUSTER / file).read_text() in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def test_the_ray_cluster_of_the_page_is_the_file_and_fits_rays_schema() -> None:
    lines = (CLUSTER / "cluster.yaml").read_text().splitlines()
    text = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
    page = [line.removeprefix("   ") for line in text.splitlines()]
    start = page.index("# cluster.yaml") + 1
    assert page[start : start + len(lines)] == lines
    util = pytest.importorskip("ray.autoscaler._private.util")
    util.validate_config(util.prepare_config(yaml.safe_load("\n".join(lines))))


def dockerfile() -> list[list[str]]:
    """The instructions of the Dockerfile, in words."""
    text = re.sub(r"^#.*\n", "", (CLUSTER / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.strip()]


def test_the_dockerfile_copies_what_is_there_and_ends_as_a_user() -> None:
    lines = dockerfile()
    assert {line[0] for line in lines} <= INSTRUCTIONS
    assert lines[0][0] == "FROM"
    copied = [name for line in lines if line[0] == "COPY" for name in line[1:-1]]
    assert all((ROOT / name).exists() for name in copied)
    assert {"pyproject.toml", "src", "README.md", "LICENSE"} <= set(copied), "what setuptools reads"
    names = [line[0] for line in lines]
    assert names.index("USER") > names.index("RUN")
    assert ["STOPSIGNAL", "SIGTERM"] in lines
    extras = next(word for line in lines for word in line if word.startswith(".["))
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    assert set(re.findall(r"\w+", extras)) <= set(known)


def test_the_commands_of_the_page_are_commands() -> None:
    fences = re.findall(r"^```(.*?)\n(.*?)^```", PAGE, re.M | re.S)
    text = "".join(body for language, body in fences if not language).replace("\\\n", " ")
    found = re.findall(r"^(?:rl-training|docker run .* rl-training) +(\w+ .*?)(?:#.*| > .*)?$", text, re.M)
    assert len(found) >= 5
    command: Any = typer.main.get_command(app)
    for line in found:
        name, *words = shlex.split(line)
        command.commands[name].make_context(name, words)


def test_the_config_of_the_page_fits_the_schema_that_an_editor_reads() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    config = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.S)[-1])
    schema = json.loads(CliRunner().invoke(app, ["config", "--schema", "--algo", "ppo"]).stdout)
    jsonschema.validate(config, schema)
    config["algo_kwargs"]["lerning_rate"] = 0.1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config, schema)


def test_acting_needs_no_package_that_the_page_does_not_install() -> None:
    installed = set(re.search(r"^pip install (numpy .*?) +#", PAGE, re.M)[1].split()) | {"rl_training"}  # type: ignore[index]
    code = """
import sys
before = {name.partition(".")[0] for name in sys.modules}
import rl_training.deploy, onnxruntime
found = {name.partition(".")[0] for name in sys.modules} - before - set(sys.stdlib_module_names)
print(" ".join(name for name in sorted(found) if not name.startswith("_")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) - {"google", "flatbuffers", "packaging"} <= installed
