"""Pages meet WCAG 2.2 A and AA as far as axe-core can tell: of reports, and one of each kind of the documentation."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from doctor.report.html.document import render_html
from doctor.session import examine
from tests.lab.speed import patience
from tests.report.browser import chromium
from tests.report.pages import logged_job, stalled_job

ROOT = Path(__file__).parents[2]
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"], "resultTypes": ["violations"]}
LOOKS = [("light", 1280), ("dark", 360)]
KINDS = (
    *("index.html", "404.html", "tutorials/hang-in-training/", "how-to/slurm/", "reference/cli/", "reference/api/"),
    *("reference/checks/", "reference/checks/NET007/", "reference/settings/", "reference/metrics/"),
    *("explanation/safety/", "evidence/", "evidence/first-steps/"),
)
"""A page of each template and of each kind of content: code of several languages, tables, generated pages."""
UNREADABLE = "<style>body, body * { color: #999 !important; background: #888 !important }</style>"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def axe():
    """axe-core, as a package for playwright brings it."""
    return pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python missing").Axe()


def violations(browser, axe, urls, scheme, width):
    """The rules that each page breaks, and the first element that does."""
    found = {}
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    for url in urls:
        page = context.new_page()
        page.goto(url, timeout=patience(20) * 1000)
        for one in axe.run(page, options=RULES).response["violations"]:
            found[url, one["id"]] = one["nodes"][0]["html"][:200]
        page.close()
    context.close()
    return found


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
def test_reports(browser, axe, tmp_path, scheme, width):
    pages = {name: render_html(examine(job), job) for name, job in (("stalled", stalled_job()), ("log", logged_job()))}
    (tmp_path / "train.py").write_text("import torch\n\nmodel = model.cuda()\ntorch.distributed.init_process_group()\n")
    lint = [sys.executable, "-m", "doctor", "lint", "train.py", "--format", "html"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'checks'}"}
    done = subprocess.run(lint, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=patience(30))
    pages["lint"] = done.stdout
    for name, text in pages.items():
        (tmp_path / f"{name}.html").write_text(text, encoding="utf-8")
    urls = [(tmp_path / f"{name}.html").as_uri() for name in pages]
    assert violations(browser, axe, urls, scheme, width) == {}
    (tmp_path / "log.html").write_text(pages["log"].replace("</body>", f"{UNREADABLE}</body>"), encoding="utf-8")
    found = violations(browser, axe, urls, scheme, width)
    assert {rule for _, rule in found} == {"color-contrast"}, "a page that nobody can read is noticed"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, *args):
        """Log nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the documentation, whose scripts work over HTTP only."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    folder = tmp_path_factory.mktemp("site")
    argv = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(argv, cwd=ROOT, env=environment, check=True, timeout=patience(120))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
def test_the_documentation(browser, axe, site, scheme, width):
    assert violations(browser, axe, [site + kind for kind in KINDS], scheme, width) == {}
