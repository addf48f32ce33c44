"""A real Chromium, driven through its DevTools protocol; it may reach nothing but files."""

import contextlib
import shutil

import pytest

from tests.lab.speed import patience

# No sandbox as root of a container; nothing of its own that would want a network.
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-default-apps", "--disable-extensions"),
]


@contextlib.contextmanager
def chromium():
    """The system's Chromium with a profile of its own that goes with it; skips where there is none. No browser is ever
    downloaded."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium is installed (Debian: chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page, and what it complained of or asked for."""

    def __init__(self, browser, path, **settings):
        self.context = browser.new_context(**settings)
        self.page = self.context.new_page()
        self.page.set_default_timeout(patience(10) * 1000)
        self.complaints, self.requests = [], []
        self.page.on("console", lambda said: self.complaints.append(f"{said.type}: {said.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def is_quiet(self):
        """Whether it said nothing, and asked for nothing but itself."""
        foreign = [url for url in self.requests if not url.startswith(("file:", "data:"))]
        return self.complaints == [] and foreign == []
