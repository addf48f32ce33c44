"""Every check has its page, and the page says what the check says."""

import re

from doctor.core.check_registry import playbook_directory
from doctor.report.playbook import all_pages, find_page, head_of, owners_of_pages, with_head
from tests.lab.cases import assert_each

CHECKS = sorted(owners_of_pages(), key=lambda check: check.id)
HEADINGS = ["What you see", "Confirm it", "Fix it now", "Fix it for good", "Why it happens", "Not this?"]


def test_every_page_has_its_form():
    assert_each(_has_its_form, [(check.id, (check,)) for check in CHECKS])


def _has_its_form(check):
    text = (playbook_directory() / f"{check.id}.md").read_text()
    assert text.startswith(head_of(check)), "run: python -m doctor.report.playbook"
    assert text.count(f"# {check.id} {check.name}\n") == 1, "one title"
    assert re.findall(r"^## (.+)$", text, flags=re.MULTILINE) == HEADINGS
    assert text.count("```") % 2 == 0
    see = text.partition("## What you see")[2].partition("## Confirm it")[0]
    assert "```" in see, "the text that people paste into a search box"


def test_no_page_without_a_check():
    assert {page.id for page in all_pages()} == {check.id for check in CHECKS}


def test_pages_are_found_by_id_and_by_name():
    for check in CHECKS:
        page = find_page(check.id.lower())
        assert (page.id, page.name, page.family, page.severity) == (
            check.id,
            check.name,
            check.family,
            check.severity.value,
        )
        assert find_page(check.name) == page
        assert "<!--" not in page.markdown


def test_neighbours_that_pages_name_exist():
    known = {check.id for check in CHECKS} | {f"DATA{n:03d}" for n in range(1, 13)}
    for page in all_pages():
        for name in re.findall(r"\b(?:ENV|NET|NCCL|GPU|MEM|HOST|VER)\d{3}\b", page.markdown):
            assert name in known or name in _LATER, (page.id, name)


_LATER = {"ENV015", "ENV016", "ENV017", "NCCL013", "GPU020", "GPU022", "MEM002", "MEM004", "MEM006", "MEM009"} | {
    "MEM011",
    "MEM012",
}
"""Ids of the catalogue that speak during or after a run."""


def test_a_head_is_made_anew_and_the_body_kept():
    check = CHECKS[0]
    once = with_head(check, "## What you see\n")
    assert once.endswith("-->\n\n## What you see\n")
    assert with_head(check, once.replace(check.name, "old-name", 1)) == once
