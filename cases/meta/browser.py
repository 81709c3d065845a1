"""A real browser for tests of the HTML page: the chromium of this machine, headless, driven by Playwright.

Nothing is downloaded here. Without a browser the tests are skipped, and say which package is missing. `make test` can
install it, and sets EAGLECHECK_REQUIRE_BROWSER; then they fail instead.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REQUIRED = "EAGLECHECK_REQUIRE_BROWSER"
NAMES = ("chromium", "chromium-browser", "google-chrome")
#: No GPU, no sandbox (tests run as root in containers), and nothing that would ask the network for anything.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
#: Where tests leave screenshots, for a person to look at.
SHOTS = "EAGLECHECK_SCREENSHOTS"


@dataclass(slots=True)
class Tab:
    """One page in a profile of its own, and everything it complained about or asked for."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


def executable() -> str | None:
    """The browser of this machine."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def lacking() -> str:
    """Why there is no browser to test with, and the package that brings it; empty if there is one."""
    if executable() is None:
        return "no chromium on this machine; install the package chromium (apt-get install chromium)"
    if importlib.util.find_spec("playwright") is None:
        return "the package playwright is missing; install it (pip install playwright)"
    return ""


@contextlib.contextmanager
def running() -> Iterator[Any]:
    """The browser, on a new and empty profile of its own, which is removed when it ends."""
    why = lacking()
    if why and os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{REQUIRED} is set, but {why}")
    if why:
        pytest.skip(why)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable(), headless=True, args=list(FLAGS))
        try:
            yield chromium
        finally:
            chromium.close()


@contextlib.contextmanager
def tab(chromium: Any, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Tab]:
    """The page opened from disk, offline, without anything that an earlier page may have left."""
    context = chromium.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", offline=True
    )
    try:
        opened = Tab(page=context.new_page())
        opened.page.on("console", lambda message: opened.complaints.append(message.text))
        opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.page.on("request", lambda request: opened.asked.append(request.url))
        opened.page.goto(page.as_uri())
        yield opened
    finally:
        context.close()


def shot(opened: Tab, name: str, folder: Path) -> Path:
    """A screenshot of the whole page, in $EAGLECHECK_SCREENSHOTS or else in `folder`."""
    place = Path(os.environ.get(SHOTS) or folder)
    place.mkdir(parents=True, exist_ok=True)
    opened.page.screenshot(path=str(place / f"{name}.png"), full_page=True)
    return place / f"{name}.png"
