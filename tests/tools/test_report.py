"""`rl-training report`: one file, complete, harmless, and written whatever a renderer does."""

from __future__ import annotations

import io
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gymnasium as gym
import matplotlib
import numpy as np
import pytest
from typer.testing import CliRunner

from rl_training import PPO
from rl_training.cli.main import app
from rl_training.errors import UserError
from rl_training.run import film
from rl_training.tools import report
from rl_training.tools.compare import group_runs
from rl_training.tools.records import find_runs
from rl_training.tools.report import NARROW, Series, draw_svg, format_number
from run_records import HOSTILE, write_group, write_run

TINY = ["--algo", "ppo", "--total-timesteps", "64", "--num-envs", "1", "--eval-episodes", "1", "--set", "num_steps=32",
        "--set", "minibatch_size=32"]  # fmt: skip
OUTSIDE = re.compile(r'(?:src|href)=(?!"(?:data:|#))|url\((?!#)|@import|<script|\bon\w+=')

BAND = "fill-opacity: 0.18"  # of a chart


class Words(HTMLParser):
    """The text of a page, and the tags that were left open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.open = "", list[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def run_command(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result.output


def page_of(*words: str) -> str:
    run_command("report", *words, "--output", "page.html")
    return Path("page.html").read_text(encoding="utf-8")


def test_everything_is_in_one_file(tmp_path: Path) -> None:
    messages = ["ppo on CartPole-v1: here", "warning: the moon is full"]
    told = {"torch": "2.9.9", "command": ["/usr/bin/rl-training", "train", "--set", "a b=1"], "messages": messages}
    for algo in ("a2c", "ppo"):
        for seed in range(3):
            write_run(tmp_path / "runs", [1.0, 5.0, 9.0 + seed], algo=algo, seed=seed, manifest=told, gamma=0.5)
    page = page_of("runs", "--no-episode")
    words = Words(page)
    assert words.open == []
    assert OUTSIDE.search(page) is None
    assert page.count("<svg") == 4  # curves and profiles, each for wide and narrow screens
    assert page.count("<title>") - 1 == page.count("<desc>") == 4
    for expected in (
        "a2c, ppo on CartPole-v1", "6 runs, 18,000 steps", "no difference shown", "10 [9, 11]", "gamma0.50.99",
        "0.3 s", "the moon is full", "and 5 more", "2.9.9", "rl-training train --set 'a b=1'",
        "rl-training train --config runs/a2c-CartPole-v1-s0-0/config.yaml", "fewer than 5 runs of a2c, ppo",
    ):  # fmt: skip
        assert expected in words.text, expected
    assert page_of("runs", "--no-episode") == page  # intervals are seeded


def test_whatever_a_run_says_is_text(tmp_path: Path) -> None:
    told = dict.fromkeys(("torch", "git", "command", "earlier"), HOSTILE) | {"messages": ["", HOSTILE]}
    env_id = HOSTILE.replace("/", "")
    write_run(tmp_path / "runs", [1.0, 2.0, 3.0], algo=HOSTILE, env_id=env_id, manifest=told, x=HOSTILE)
    write_run(tmp_path / "runs", [1.0, "inf"], algo=f"{HOSTILE}2", env_id=env_id, manifest=told)
    folder = next((tmp_path / "runs").rglob("metrics.jsonl")).parent
    page = page_of(str(folder.parents[1]))
    assert Words(page).open == []
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "has no checkpoint" in page


def test_runs_without_returns_still_get_a_page(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", [None, "nan"])
    text = Words(page_of("runs")).text
    assert "No learning curve" in text
    assert "train them for longer" in text
    assert "eval_return_mean was not finite in some row" in text


def test_a_group_without_a_curve_does_not_hide_the_others(tmp_path: Path) -> None:
    write_group(tmp_path / "runs", [10.0], algo="ppo")
    write_run(tmp_path / "runs", [5.0], algo="bc")
    page = page_of("runs", "--no-episode")
    assert "Too few points of bc." in page
    assert "return of evaluations over steps: ppo goes from 0 to 10." in page


def test_a_run_that_stopped_early_and_one_that_was_resumed_are_told_apart(tmp_path: Path) -> None:
    told = {"command": ["x.py"], "earlier": [{"command": ["rl-training"]}]}
    folder = write_run(tmp_path / "runs", [1.0, 2.0], manifest=told)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("total_timesteps: 2000", "total_timesteps: 9000"))
    run = find_runs([str(folder)])[0]
    assert report.training_seconds(run) is None
    text = Words(report.build_report(group_runs([run]))).text
    assert "at step 2,000 of 9,000" in text
    assert "rl-training\npython x.py" in text


def test_a_report_names_unfinished_runs_and_leaves_them_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in range(2):
        write_run(tmp_path / "runs", [0.0, 5.0, 7.0, 10.0 + seed], seed=seed)
    write_run(tmp_path / "runs", [0.0, 5.0, 500.0], seed=2, budget=4_000)
    text = Words(page_of("runs", "--no-episode")).text
    assert "ppo 10.5 [10, 11]" in text
    assert "unfinished and left out: ppo-CartPole-v1-s2-2 (stopped at step 3,000 of 4,000)" in text
    result = run_command("plot", "runs")
    assert "unfinished and left out: ppo-CartPole-v1-s2-2" in result
    assert "ppo goes from 0 to 10.5" in Path("curves.svg").read_text()
    run_command("plot", "runs", "--shared-steps")
    assert "ppo goes from 0 to 171.3" in Path("curves.svg").read_text()  # of 7, 7 and 500 at step 3,000


class Drawn(gym.Env[Any, Any]):
    """Ten steps; renders frames that count them, or fails as it is told to."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    mode = "frames"

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self.steps = render_mode, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, self.steps == 10, False, {}

    def render(self) -> Any:
        if self.mode == "raises":
            raise OSError("<no> display")
        return None if self.mode == "nothing" else np.full((40, 60, 3), 20 * self.steps, np.uint8)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("drawn")
    run_command("train", *TINY, "--env", f"{__name__}:Drawn", "--output-dir", str(folder))
    return str(folder)


def test_an_episode_is_shown_as_a_moving_picture(trained: str) -> None:
    from PIL import Image

    page = page_of(trained)
    assert f"ppo on {__name__}:Drawn: 10 steps, return 10, by best.ckpt" in page
    assert "data:image/gif;base64," in page
    assert "<td>num_steps</td>" in page
    assert "<td>vectorization</td>" not in page  # what auto became was not chosen
    run = find_runs([trained])[0]
    shown = film.film_checkpoint(run.folder / "checkpoints" / "best.ckpt")
    assert shown.told == "10 steps, return 10"
    with Image.open(io.BytesIO(shown.gif)) as image:
        assert (getattr(image, "n_frames", 1), image.info["duration"]) == (10, 100)


@pytest.mark.parametrize(("mode", "reason"), [("raises", "OSError: &lt;no&gt; display"), ("nothing", "rgb_array")])
def test_what_a_renderer_does_costs_only_the_picture(
    trained: str, mode: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drawn, "mode", mode)
    page = page_of(trained)
    assert reason in page
    assert "image/gif" not in page
    assert "Run it again" in page


@pytest.mark.filterwarnings("error")
def test_an_environment_that_cannot_render_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gymnasium warns of its id; the page says that there is no picture."""
    monkeypatch.setitem(gym.registry, "Plain-v0", gym.envs.registration.EnvSpec("Plain-v0", "env_zoo:Walk"))
    run_command("train", "--env", "Plain-v0", *TINY)
    assert "no episode, because" in page_of("runs")
    assert "UserError" not in page_of("runs")


def test_no_environment_is_made_when_no_episode_is_asked_for(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(film, "film_checkpoint", lambda *_: pytest.fail("an environment was made"))
    assert "Episodes" not in page_of(trained, "--no-episode")


def test_a_long_episode_is_thinned_to_few_frames(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(film, "MOST_FRAMES", 4)
    from PIL import Image

    checkpoint = find_runs([trained])[0].folder / "checkpoints" / "best.ckpt"
    with Image.open(io.BytesIO(film.film_checkpoint(checkpoint).gif)) as image:
        assert (getattr(image, "n_frames", 1), image.info["duration"]) == (3, 400)  # steps 0, 4 and 8
    monkeypatch.setattr(film, "MOST_STEPS", 7)
    assert film.film_checkpoint(checkpoint).told == "the first 7 steps, return 7"


def test_a_film_is_shown_by_a_notebook_and_saved(trained: str, tmp_path: Path) -> None:
    ppo = PPO.load(find_runs([trained])[0].folder / "checkpoints" / "best.ckpt", env=Drawn)
    shown = ppo.video()
    assert shown._repr_html_().startswith('<img alt="10 steps, return 10" src="data:image/gif;base64,R0lG')
    assert shown.save(tmp_path / "e.gif").read_bytes() == shown.gif
    with pytest.raises(UserError, match=r"path is 'e.mp4'; this film is a GIF, so it must end in .gif"):
        shown.save("e.mp4")
    assert ppo.video(seed=7).told == "10 steps, return 10"


def test_an_output_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    write_group(tmp_path / "runs", [1.0])
    sentence = run_command("report", "runs", "--no-episode", "--output", "nowhere/r.html", code=2)
    assert "--output nowhere/r.html cannot be written: No such file or directory." in sentence


# ---- plot ----------------------------------------------------------------------------------------


def test_plot_writes_svg_png_and_pdf(tmp_path: Path) -> None:
    for algo in ("a2c", "ppo"):
        write_group(tmp_path / "runs", [10.0, 20.0, 30.0], algo=algo)
    run_command("plot", "runs", "--output", "curves.svg")
    drawing = Path("curves.svg").read_text(encoding="utf-8")
    tree = ElementTree.fromstring(drawing)
    assert tree.tag == "{http://www.w3.org/2000/svg}svg"
    assert "a2c goes from 0 to 20; ppo goes from 0 to 20." in drawing
    assert drawing.count(BAND) == 2
    assert "prefers-color-scheme:dark" in drawing  # it brings its own colors
    for name, magic in (("curves.png", b"\x89PNG"), ("curves.pdf", b"%PDF")):
        run_command("plot", "runs", "--output", name)
        assert Path(name).read_bytes().startswith(magic)


def test_plot_draws_a_chart_per_environment_and_says_what_lines_and_bands_are(tmp_path: Path) -> None:
    for algo in ("ppo", "a2c"):
        write_group(tmp_path / "runs", [10.0, 12.0, 14.0], algo=algo)
    write_group(tmp_path / "runs", [-100.0, -120.0], env_id="Pendulum-v1")
    write_run(tmp_path / "runs", [1.0], env_id="Acrobot-v1")
    shown = run_command("plot", "runs")
    assert "Acrobot-v1: too few evaluations" in shown
    drawing = Path("curves.svg").read_text(encoding="utf-8")
    assert drawing.count(BAND) == 3
    assert "Line: interquartile mean of 2 to 3 runs. Band: 95% bootstrap interval." in drawing
    found = [drawing.count(color) for color in report.COLORS[:2]]
    assert found == [3, 5]  # line, band and name of a2c; ppo has two lines and two bands
    for name in ("CartPole-v1", "Pendulum-v1"):
        assert f">{name}<" in drawing
    write_run(tmp_path / "one", [1.0, 2.0, 3.0])
    run_command("plot", "one")
    assert "Line: one run." in Path("curves.svg").read_text(encoding="utf-8")


def test_plot_refuses_what_it_cannot_draw(tmp_path: Path) -> None:
    write_group(tmp_path / "runs", [10.0])
    refused = run_command("plot", "runs", "--output", "c.jpg", code=2)
    assert "--output is 'c.jpg'; it must end in .svg, .png or .pdf." in refused
    write_run(tmp_path / "short", [1.0])
    assert "to draw a curve" in run_command("plot", "short", code=2)
    assert not Path("curves.svg").exists()


# ---- drawing -------------------------------------------------------------------------------------


def test_numbers_are_short() -> None:
    values = (0.0, 0.30000000000000004, 250.0, -1200.0, 20_000, 1.5e6, 3e9)
    assert [format_number(value) for value in values] == ["0", "0.3", "250", "-1.2k", "20k", "1.5M", "3G"]


def test_lines_and_bands_lie_where_their_values_are() -> None:
    x, y = np.array([0.0, 50.0, 100.0]), np.array([0.0, 5.0, 10.0])
    drawn = draw_svg([Series("a", x, y, y - 1, y + 1)], "t", "x", "y")
    points = re.search(r'<path d="M ([^"z]+)" clip-path="[^"]+" style="fill: none; stroke: #0072b2', drawn)
    assert points is not None
    (x0, y0), (x1, y1), (x2, y2) = (map(float, pair.split()) for pair in points[1].split("L"))
    assert (x1 - x0, y1 - y0) == pytest.approx((x2 - x1, y2 - y1), abs=0.11)
    assert x0 < x2 <= 540
    assert y2 < y0  # up is more
    assert drawn.count(BAND) == 1
    nan = np.full(3, np.nan)
    assert BAND not in draw_svg([Series("a", x, y, nan, nan)], "t", "x", "y")


def test_one_value_can_be_drawn() -> None:
    point = np.array([3.0])
    assert "nan" not in draw_svg([Series("a", point, point)], "t", "x", "y")


def test_a_long_name_is_cut_where_the_chart_ends() -> None:
    line = np.arange(3.0)
    drawn = draw_svg([Series(name, line, line) for name in ("short", "n" * 200)], "t", "x", "y", size=NARROW)
    shown = re.findall(r"<text[^>]+>([^<]+)</text>", drawn)
    assert "short" in shown
    assert "n" * 34 + "…" in shown


def test_names_are_text_and_the_same_chart_is_the_same_file() -> None:
    line = np.arange(3.0)
    series = [Series(name, line, line) for name in ("$x_1$", "<b>", "_hidden", "中\x1b")]
    drawn = draw_svg(series, "t", "x", "y")
    assert re.findall(r"<text[^>]+>([^<]+)</text>", drawn)[-4:] == ["$x_1$", "&lt;b&gt;", "_hidden", "中"]
    with matplotlib.rc_context({"text.usetex": True, "lines.linewidth": 9.0}):  # as a matplotlibrc here could say
        assert drawn == draw_svg(series, "t", "x", "y")
    assert " id=" not in re.sub('<(path|clipPath) id="[pm][0-9a-f]+"', "", drawn)  # those are hashes


# ---- in a browser --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_browser_draws_it(tmp_path: Path) -> None:
    """Charts have a size, nothing is asked of the network or wider than the screen, and the console is silent."""
    browsers = pytest.importorskip("playwright.sync_api")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("there is no Chromium")
    for algo in ("a2c", "ppo"):
        write_group(tmp_path / "runs", [10.0, 20.0, 30.0], algo=algo, hidden_sizes=[64] * 40)
    page_of("runs", "--no-episode")
    address = f"file://{Path('page.html').resolve()}"
    heights = "[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height).filter(h => h)"
    with browsers.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width, scheme, back in ((1200, "light", "rgb(255, 255, 255)"), (390, "dark", "rgb(21, 24, 28)")):
            said: list[str] = []
            page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
            page.on("console", lambda message, said=said: said.append(message.text))
            page.on("pageerror", lambda error, said=said: said.append(str(error)))
            page.on("request", lambda request, said=said: said.append(request.url))
            page.goto(address)
            boxes = [chart.bounding_box() for chart in page.query_selector_all("svg") if chart.is_visible()]
            assert [url for url in said if not url.startswith("data:")] == [address]
            assert len(boxes) == 2
            assert all(box["width"] > 300 and box["height"] > 200 for box in boxes)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert min(page.evaluate(heights)) >= 10
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == back
        browser.close()
