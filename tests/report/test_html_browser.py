"""The page in a real browser: it works by keyboard, in light, dark and narrow, and neither errs nor asks a network."""

import pytest

from doctor.report.html.document import render_html
from doctor.session import examine
from tests.report.browser import Watched, chromium
from tests.report.pages import HOSTILE, logged_job, stalled_job


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    jobs = {"stalled": stalled_job(), "logged": logged_job(), "large": stalled_job(8, 8)}
    for name, job in jobs.items():
        (folder / f"{name}.html").write_text(render_html(examine(job), job), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in jobs}


@pytest.fixture
def stalled(browser, paths):
    watched = Watched(browser, paths["stalled"], viewport={"width": 1280, "height": 900}, color_scheme="light")
    yield watched
    assert watched.is_quiet(), (watched.complaints, watched.requests)
    watched.context.close()


def ranks_shown(page):
    return page.eval_on_selector_all(
        "#rank-table tbody tr:not([hidden]) th", "cells => cells.map(cell => Number(cell.textContent))"
    )


def test_ranks_are_filtered(stalled):
    page = stalled.page
    page.get_by_label("Filter", exact=True).fill("node1")
    assert ranks_shown(page) == [4, 5, 6, 7]
    assert page.locator("#rank-count").inner_text() == "4 of 8 ranks"
    page.get_by_label("Filter", exact=True).fill("2-4 backward")
    assert ranks_shown(page) == [3, 4]
    page.get_by_label("Filter", exact=True).fill("")
    page.get_by_label("only ranks named in a finding").check()
    assert ranks_shown(page) == [2]


def test_rows_of_many_ranks_are_filtered_by_rank_and_host(browser, paths):
    watched = Watched(browser, paths["large"])
    page = watched.page
    rows = page.locator("#rank-table tbody tr:visible th")
    for words, shown in (
        ("node7", ["0-20,22-63"]),
        ("21", ["21"]),
        ("40-50", ["0-20,22-63"]),
        ("", ["0-20,22-63", "21"]),
    ):
        page.get_by_label("Filter", exact=True).fill(words)
        assert rows.all_inner_texts() == shown
    assert page.locator("#rank-count").inner_text() == "64 ranks"
    assert watched.is_quiet(), (watched.complaints, watched.requests)
    watched.context.close()


def test_ranks_are_sorted_by_keyboard(stalled):
    page = stalled.page
    heading = page.locator("#rank-table thead th").first
    heading.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert ranks_shown(page) == [7, 6, 5, 4, 3, 2, 1, 0]
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") is None
    assert page.locator("#rank-table [aria-sort]").inner_text() == "state"


def test_evidence_and_playbook_open(stalled):
    page = stalled.page
    evidence = page.locator("details.evidence").first
    assert not evidence.locator("li").first.is_visible()
    evidence.locator("summary").focus()
    page.keyboard.press("Enter")
    assert evidence.locator("li").first.is_visible()
    page.locator('a[href="#playbook-RUN001"]').first.click()
    assert page.locator("#playbook-RUN001 h4").first.is_visible()


def test_the_theme_changes_and_the_charts_with_it(stalled):
    page = stalled.page
    sheet = "getComputedStyle(document.querySelector('#verdict')).backgroundColor"
    chart = "getComputedStyle(document.querySelector('#timeline-chart .s-work')).fill"
    assert page.evaluate(sheet) == "rgb(255, 255, 255)"
    before = page.evaluate(chart)
    page.get_by_role("button", name="Change to dark colours").click()
    assert page.evaluate(sheet) != "rgb(255, 255, 255)"
    assert page.evaluate(chart) != before
    page.reload()
    assert page.get_by_role("button", name="Change to light colours").is_visible()


def shown_of(page):
    """The share of the timeline that its frame shows: where it begins and ends."""
    return page.evaluate(
        "(() => { const plot = document.getElementById('timeline-chart');"
        " return [plot.scrollLeft / plot.scrollWidth, (plot.scrollLeft + plot.clientWidth) / plot.scrollWidth] })()"
    )


def test_charts_are_drawn_and_moved_by_buttons(stalled):
    page = stalled.page
    assert page.locator("#timeline-chart svg rect").count() > 8 * 20
    assert "rank 2 · node0" in page.locator("#timeline .names").inner_text()
    begin, end = shown_of(page)
    assert (begin > 0.1, end) == (True, pytest.approx(1, abs=0.01))
    assert page.locator(".ticks[data-view=all]").evaluate("one => getComputedStyle(one).display") == "none"
    page.get_by_role("button", name="Whole run").click()
    assert shown_of(page) == [0, 1]
    page.get_by_role("button", name="Zoom in").click()
    begin, end = shown_of(page)
    assert end - begin == pytest.approx(0.5, abs=0.02)
    page.get_by_label("Quantity").first.select_option(label="host, this process")
    assert page.locator("#memory-chart figure:visible").count() == 1
    assert "GiB" in page.locator("#memory-chart figure:visible").inner_text()
    assert page.locator("#pairs-chart figure:visible rect").count() == 2


def test_a_shape_has_its_text(stalled):
    titles = stalled.page.locator("#timeline-chart rect.s-still title").all_text_contents()
    assert len(titles) == 8
    assert all("stalled for 12 s" in title for title in titles)


def test_checks_are_filtered(stalled):
    page = stalled.page
    page.get_by_text("All checks:").click()
    rows = page.locator("#check-table tbody tr:visible")
    every = rows.count()
    page.get_by_label("Family").select_option("nccl")
    family = rows.count()
    assert 0 < family < every
    page.get_by_label("Status", exact=True).select_option("info")
    assert [row.split()[0] for row in rows.all_inner_texts()] == ["NCCL011"]
    assert page.locator("#check-count").inner_text() == f"1 of {every} checks"
    page.get_by_label("Family").select_option("")
    page.get_by_label("Status", exact=True).select_option("")
    page.get_by_label("Filter checks").fill("RUN001 stalled")
    assert [row.split()[0] for row in rows.all_inner_texts()] == ["RUN001"]


def test_the_navigation_leads_to_each_section_and_stays(stalled):
    page = stalled.page
    links = page.get_by_role("navigation", name="Sections of the report").get_by_role("link")
    top = "document.querySelector(location.hash).getBoundingClientRect().top"
    for name in ("Timeline", "Checks", "Verdict"):
        links.get_by_text(name, exact=True).click()
        page.wait_for_function(f"() => 30 < {top} && {top} < innerHeight - 100")
        assert links.first.is_visible()


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_a_fix_is_copied_by_one_click_also_from_a_file(browser, paths, has_clipboard):
    watched = Watched(browser, paths["stalled"], permissions=["clipboard-read", "clipboard-write"])
    page = watched.page
    if not has_clipboard:
        page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    button = page.get_by_role("button", name="Copy py-spy dump --pid 10002")
    button.focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Copied").wait_for()
    assert page.locator("#copied").inner_text() == "Copied"
    page.get_by_label("Filter", exact=True).focus()
    page.keyboard.press("Control+V")
    assert page.get_by_label("Filter", exact=True).input_value() == "py-spy dump --pid 10002"
    assert watched.is_quiet(), (watched.complaints, watched.requests)
    watched.context.close()


@pytest.mark.parametrize("width", [320, 390, 1280, 2400])
def test_no_width_makes_the_page_scroll_sideways(browser, paths, width):
    for path in paths.values():
        watched = Watched(browser, path, viewport={"width": width, "height": 800})
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
        assert watched.is_quiet(), (watched.complaints, watched.requests)
        watched.context.close()


def test_paper_shows_what_was_folded(browser, paths):
    watched = Watched(browser, paths["stalled"])
    watched.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    watched.page.emulate_media(media="print")
    assert watched.page.locator("details:not([open])").count() == 0
    assert watched.page.locator("#playbook-RUN001 h4").first.is_visible()
    assert not watched.page.get_by_label("Filter", exact=True).is_visible()
    watched.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert watched.page.locator("details[open]").count() == 0
    assert watched.page.pdf()[:5] == b"%PDF-"
    assert watched.is_quiet(), (watched.complaints, watched.requests)
    watched.context.close()


def test_the_page_can_be_read_without_scripts(browser, paths):
    watched = Watched(browser, paths["stalled"], java_script_enabled=False)
    assert watched.page.get_by_role("heading", level=1).is_visible()
    assert watched.page.locator("#rank-table tbody tr").count() == 8
    assert watched.page.locator("#timeline-chart svg").first.is_visible()
    assert watched.page.locator("#memory-chart figure:visible").count() == 3
    assert watched.page.get_by_role("button").count() == 0
    watched.context.close()


def test_nothing_that_was_read_runs(browser, paths):
    watched = Watched(browser, paths["logged"])
    for details in watched.page.locator("details").all():
        details.evaluate("one => one.open = true")
    assert "rankdoctor report" in watched.page.title()
    assert "<script>document.title='owned'</script>" in watched.page.locator("main").inner_text()
    assert watched.page.locator("main img, main script").count() == 0
    assert HOSTILE.partition("\x1b")[0].strip().split()[0] in watched.page.locator("#ranks").inner_text()
    assert watched.is_quiet(), (watched.complaints, watched.requests)
    watched.context.close()
