"""The built site in a browser, opened as files: nothing is wider than the screen, nothing fails, the search finds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
pytest.importorskip("mkdocs")
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tools:
        opened = tools.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield opened
        opened.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_no_page_is_wider_than_the_screen_and_none_reports_an_error(site: Path, browser: Any, width: int) -> None:
    page, wrong = browser.new_page(viewport={"width": width, "height": 844}), []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    for file in sorted(site.rglob("*.html")):
        if file.name == "404.html":  # its links begin at the root of a server
            continue
        page.goto(file.as_uri())
        page.wait_for_load_state("load")
        found = page.evaluate("document.documentElement.scrollWidth")
        assert found <= width, f"{file.relative_to(site)} is {found} pixels wide on a screen of {width}"
        assert not wrong, f"{file.relative_to(site)}: {wrong}"
    page.close()


@pytest.mark.parametrize("name", ["index.html", "algorithms/sac.html"])
def test_the_search_works_without_a_server(site: Path, browser: Any, name: str) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((site / name).as_uri())
    page.click(".md-search__input")
    page.keyboard.type("temperature")
    page.wait_for_selector(".md-search-result__item")
    page.keyboard.press("Enter")
    page.wait_for_url("**/*h=temperature*")
    assert page.url.startswith("file:")
    page.close()


def test_no_page_asks_another_server(site: Path, browser: Any) -> None:
    page, asked = browser.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    for name in ("index.html", "results.html", "algorithms/ppo.html", "api.html"):
        page.goto((site / name).as_uri())
        page.wait_for_load_state("load")
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    page.close()
