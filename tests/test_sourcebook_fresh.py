"""The generated documents and stubs are what the generator renders now, and the sourcebook is complete."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMES = (
    "a2c ppo trpo impala appo dqn double_dqn dueling_dqn noisy_dqn prioritized_dqn n_step_dqn c51_dqn qr_dqn iqn fqf "
    "rainbow_dqn ddpg td3 sac naf d4pg rlpd bc mopo mbpo gail dreamer"
)
CONTRACT = NAMES.split()
EXPLAINED = dict.fromkeys(("ACER", "ACKTR", "Ape-X"), "deferred for runtime redesign") | dict.fromkeys(
    ("A3C", "Asynchronous IMPALA", "Asynchronous APPO"), "implemented by settings"
)


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered so that dataclasses can resolve the module's annotations.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "generate_docs", module)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rendered(generator: ModuleType) -> dict[Path, str]:
    return generator.render_all()


@pytest.fixture(scope="module")
def sourcebook(generator: ModuleType, rendered: dict[Path, str]) -> str:
    return rendered[generator.SOURCEBOOK]


def test_generated_files_on_disk_are_fresh(generator: ModuleType, rendered: dict[Path, str]) -> None:
    stale = [str(path.relative_to(ROOT)) for path in generator.stale_files(rendered)]
    assert not stale, f"run `python scripts/generate_docs.py`: stale {stale}"


def test_every_year_has_an_entry(sourcebook: str) -> None:
    for year in range(2014, 2027):
        section = re.search(rf"^## {year}\n(.*?)(?=^## |\Z)", sourcebook, flags=re.DOTALL | re.MULTILINE)
        assert section, f"no section for {year}"
        assert len([line for line in section[1].splitlines() if line.startswith("|")]) > 2, f"{year} is empty"


@pytest.mark.parametrize("name", EXPLAINED)
def test_what_is_deferred_or_made_by_settings_is_explained(sourcebook: str, name: str) -> None:
    assert re.search(rf"^\| {re.escape(name)} \| {EXPLAINED[name]} \|", sourcebook, flags=re.MULTILINE)
    reason = re.search(rf"^- \*\*{re.escape(name)}\*\* \(\d{{4}}\): (.+)$", sourcebook, flags=re.MULTILINE)
    assert reason
    assert len(reason[1].split()) >= 10


@pytest.mark.parametrize("name", CONTRACT)
def test_every_contract_algorithm_appears_exactly_once(sourcebook: str, name: str) -> None:
    assert sourcebook.count(f"(`{name}`)") == 1


def test_status_of_contract_algorithms_follows_the_registry(generator: ModuleType, sourcebook: str) -> None:
    registered = {spec.name for spec in generator.registered_specs()}
    for name in CONTRACT:
        status = "already implemented" if name in registered else "in this batch"
        assert f"(`{name}`) | {status} |" in sourcebook


def test_data_file_names_nothing_twice(generator: ModuleType) -> None:
    data = generator.load_data()
    assert sorted(plan["name"] for plan in data["planned"]) == sorted(CONTRACT)
    names = [entry["name"] for entry in data["entries"]] + [plan["class_name"] for plan in data["planned"]]
    assert len(names) == len(set(names))


def test_a_stale_file_and_a_lost_marker_are_reported(generator: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    assert generator.stale_files({path: "new"}) == [path]
    path.write_text("new", encoding="utf-8")
    assert generator.stale_files({path: "new"}) == []
    with pytest.raises(ValueError, match="commands:begin"):
        generator.fill("no markers here", "commands", "text")
