"""The generated documents and stubs are what the generator renders now; sourcebook and algorithm pages are complete."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resume_cases import SPECS, take_steps, tiny
from rl_training.algorithms.base import UpdateResult
from rl_training.run.build import open_session

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import generate_docs as generator  # noqa: E402
import learner_lines  # noqa: E402

NAMES = (
    "a2c ppo trpo impala appo dqn double_dqn dueling_dqn noisy_dqn prioritized_dqn n_step_dqn c51_dqn qr_dqn iqn fqf "
    "rainbow_dqn ddpg td3 sac naf d4pg rlpd bc mopo mbpo gail dreamer"
)
CONTRACT = NAMES.split()
DEFERRED = ("ACER", "ACKTR", "MuZero", "TD-MPC2", "MADDPG", "QMIX", "MAPPO")
BY_SETTINGS = ("Ape-X", "A3C", "Asynchronous IMPALA", "Asynchronous APPO", "HER", "DRQN", "DrQ-v2", "Cal-QL")
EXPLAINED = dict.fromkeys(DEFERRED, generator.DEFERRED) | dict.fromkeys(BY_SETTINGS, generator.BY_SETTINGS)


@pytest.fixture(scope="module")
def rendered() -> dict[Path, str]:
    return generator.render_all()


@pytest.fixture(scope="module")
def sourcebook(rendered: dict[Path, str]) -> str:
    return rendered[generator.SOURCEBOOK]


def test_generated_files_on_disk_are_fresh(rendered: dict[Path, str]) -> None:
    stale = [str(path.relative_to(ROOT)) for path in generator.stale_files(rendered)]
    assert not stale, f"run `python scripts/generate_docs.py`: stale {stale}"
    assert set(generator.PAGES.iterdir()) <= set(rendered), "a page of an algorithm that is not registered"


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


def test_status_of_contract_algorithms_follows_the_registry(sourcebook: str) -> None:
    registered = {spec.name for spec in generator.registered_specs()}
    for name in CONTRACT:
        status = "already implemented" if name in registered else "in this batch"
        assert f"(`{name}`) | {status} |" in sourcebook


def test_data_file_names_nothing_twice() -> None:
    data = generator.load_data()
    assert sorted(plan["name"] for plan in data["planned"]) == sorted(CONTRACT)
    names = [entry["name"] for entry in data["entries"]] + [plan["class_name"] for plan in data["planned"]]
    assert len(names) == len(set(names))


def test_a_stale_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    assert generator.stale_files({path: "new"}) == [path]
    path.write_text("new", encoding="utf-8")
    assert generator.stale_files({path: "new"}) == []


def test_an_algorithm_without_its_page_is_told_what_is_missing() -> None:
    ppo, new = SimpleNamespace(name="ppo"), SimpleNamespace(name="new")
    texts, site = generator.load_texts(), generator.SITE.read_text(encoding="utf-8")
    assert list(generator.find_missing([ppo, new], texts, site)) == [
        "new has no preset; add one to src/rl_training/assets/configs/new.",
        "new is not in docs/algorithms.yaml; add it with `for`, `equations` and `watch`.",
        "algorithms/new.md is not in the nav of mkdocs.yml; add it.",
    ]
    assert not list(generator.find_missing(generator.registered_specs(), texts, site))


def test_every_algorithm_is_described_in_full() -> None:
    texts = generator.load_texts()["algorithms"]
    assert sorted(texts) == sorted({*CONTRACT, *(spec.name for spec in generator.registered_specs())})
    for name, text in texts.items():
        assert set(text) == {"for", "equations", "watch"}, name
        assert len(text["for"].split()) >= 20, name
        assert 1 <= len(text["equations"]) <= 5, name
        assert 1 <= len(text["watch"]) <= 3, name
        for equation in text["equations"]:
            tex = re.sub(r"\\.", "", equation["tex"])  # without escaped braces
            assert tex.count("{") == tex.count("}"), (name, tex)
            assert equation["tex"].count(r"\begin") == equation["tex"].count(r"\end"), (name, tex)
            assert equation["says"].strip().endswith("."), (name, equation["says"])


def test_a_page_shows_every_hyper_parameter_preset_and_gate(rendered: dict[Path, str]) -> None:
    gates = generator.load_gates().values()
    for spec in generator.registered_specs():
        page = rendered[generator.PAGES / f"{spec.name}.md"]
        parts = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page, flags=re.DOTALL | re.MULTILINE))
        listed = re.findall(r"^\| `(\w+)` \|", parts["Hyper-parameters"], flags=re.MULTILINE)
        assert sorted(listed) == sorted(set(spec.params.model_fields) - {"schedules"}), spec.name
        assert parts["Presets"].count(f"`{spec.name}/") == len(generator.presets_of(spec.name))
        own = [gate for gate in gates if gate.preset.split("/")[0] == spec.name]
        assert own, spec.name
        assert parts["What it reached"].count(f"| `{spec.name}/") == len(own)


def test_a_preset_reached_what_fresh_runs_of_it_as_it_is_reached() -> None:
    def judged(overrides: dict[str, Any], status: str, *means: float) -> Any:
        gate = SimpleNamespace(preset="ppo/cartpole", overrides=overrides)
        records = [{"eval": {"mean": mean}, "global_step": 10 * i} for i, mean in enumerate(means, 1)]
        return gate, SimpleNamespace(status=status, records=records)

    looks, other = {"algo_kwargs": {"early_stopping": {"threshold": 1}}}, {"algo_kwargs": {"gamma": 0.5}}
    shown = {"ppo/cartpole": {"score": 2.0, "seeds": 3, "steps": 30}}
    runs = judged({}, "fail", 1, 2, 3)
    assert generator.scores_of([judged(looks, "pass", 9), runs]) == shown
    assert generator.scores_of([judged(looks, "pass", 1, 2, 3)]) == shown
    for nothing in (judged(other, "pass", 9), judged({}, "stale", 9), judged({}, "not run")):
        assert generator.scores_of([nothing]) == {}
    best = ({**runs[1].records[0], "best": {"mean": 7.0}},)
    assert generator.scores_of([(runs[0], SimpleNamespace(status="pass", records=best))])["ppo/cartpole"]["score"] == 7


def test_a_preset_reached_on_a_gpu_what_the_last_policies_of_its_seeds_score() -> None:
    runs = json.loads((ROOT / "benchmarks" / "results" / "physics_gpu.json").read_text(encoding="utf-8"))["learn"]
    ants = [run["marks"][-1] for run in runs if run["preset"] == "ppo/ant_gpu" and run["seed"] in (0, 1, 2)]
    reached = generator.scores_on_a_gpu()["ppo/ant_gpu"]
    assert reached["score"] == sorted(mark["return"] for mark in ants)[1]
    assert (reached["seeds"], reached["steps"]) == (3, max(mark["step"] for mark in ants))


def test_links_of_the_pages_lead_to_files(rendered: dict[Path, str]) -> None:
    pages = {path: text for path, text in rendered.items() if path.parent == generator.PAGES}
    targets = [(path, link) for path, text in pages.items() for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text)]
    missing = [link for path, link in targets if "://" not in link and not (path.parent / link).is_file()]
    assert targets
    assert not missing


@pytest.mark.slow
@pytest.mark.parametrize("algo", CONTRACT)
def test_metrics_to_watch_are_logged(algo: str) -> None:
    session = open_session(tiny(algo, Path("unused"), threads=1))
    store, step, result = session.store, 0, UpdateResult({})
    phase = ""
    while phase != "policy":
        step += take_steps(session, step)
        for phase, batch in store.batches(session.algorithm, step):
            result = session.algorithm.update(batch, phase=phase, global_step=step, sync=False)
            store.feedback(batch, result)
    scheduled = SPECS[algo].params().built_in_schedules()
    session.close()
    watched = set(generator.load_texts()["algorithms"][algo]["watch"])
    assert watched <= {*result.metrics, *store.metrics, *scheduled, "episode_return_mean"}


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"type": "number"}, "any number"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "> 0 and ≤ 1"),
        ({"type": "integer", "minimum": 1, "maximum": 1000}, "whole number from 1 to 1,000"),
        ({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}, "whole number ≥ 1 or null"),
        ({"enum": ["tanh", "relu"], "type": "string"}, "`tanh`, `relu`"),
        ({"anyOf": [{"type": "number"}, {"const": "auto", "type": "string"}]}, "any number or `auto`"),
        ({"items": {"type": "integer"}, "type": "array"}, "list, each a whole number"),
        ({"$ref": "#/$defs/EarlyStopping"}, "mapping"),
    ],
)
def test_a_range_is_said_in_words(field: dict[str, Any], words: str) -> None:
    assert generator.describe_range(field) == words


def test_lines_of_code_are_those_that_do_something() -> None:
    value = 'x = (\n    1,  # one\n\n    """two\nlines""",\n)\n'
    source = f'"""Doc\nstring."""\n\n# comment\n{value}\n\ndef f():\n    """Doc."""\n'
    assert learner_lines.code_lines(source) == {5, 6, 8, 9, 10, 13}


def test_every_newer_algorithm_stays_below_its_bar() -> None:
    names = learner_lines.yaml.safe_load(learner_lines.DATA.read_text(encoding="utf-8"))["names"]
    assert {spec.name for spec in generator.registered_specs()} <= {*names, *CONTRACT}
    for name, entry in names.items():
        parts = learner_lines.measure(name, entry)
        assert 0 < len(parts["learner"] | parts["entry"]) <= entry.get("bar", learner_lines.BAR), name


def test_a_part_that_was_renamed_is_missed() -> None:
    with pytest.raises(ValueError, match="gone of learner_lines"):
        learner_lines.read_parts([{"algorithms/pqn.py": ["PQN.gone"]}])
