"""Whatever stands in a job, the page has the same elements."""

import pytest

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from doctor.api import Finding, Severity, Source, check  # noqa: E402
from doctor.core.check_registry import CheckRegistry  # noqa: E402
from doctor.core.settings import Settings  # noqa: E402
from doctor.facts import HostFacts, SoftwareFacts  # noqa: E402
from doctor.report.html.document import render_html  # noqa: E402
from doctor.report.markdown import render_markdown  # noqa: E402
from doctor.session import judge  # noqa: E402
from doctor.testing import healthy  # noqa: E402
from tests.report.test_document import Page  # noqa: E402
from tests.report.test_markdown import elements  # noqa: E402

PIECES = (
    "<",
    ">",
    "&",
    '"',
    "'",
    "</script>",
    "<!--",
    "-->",
    "]]>",
    "<b>",
    "\\",
    "|",
    "\n",
    "\x1b[2J",
    "\u202e",
    "{{",
    "{%",
)
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), min_size=1, max_size=8).map("".join)


def reported(text):
    """A report in which everything that a job can tell is ``text``."""

    def faulty_thing(job):
        yield Finding(
            f"x {text}",
            hosts=(f"h{text}",),
            evidence={"said": [f"a.log:1: {text}"], "other": f"o {text}"},
            effect=f"e {text}",
            fix=f"f {' '.join(text.split())}",  # its lines are commands
            source=Source(f"s{text}"),
        )

    made = check(id="NET901", severity=Severity.ERROR, needs=(SoftwareFacts,))(faulty_thing)
    job = healthy(1, 2).alter(HostFacts, hostname=f"n{text}").job()
    return judge(job, CheckRegistry([made]), Settings()), job


PLAIN = [tag for tag, _ in Page(render_html(*reported("plain"))).elements]


@settings(max_examples=60, deadline=None, database=None)
@given(TEXTS.map(lambda text: text.replace("`", "")))
def test_a_page_has_the_same_elements_whatever_was_read(text):
    page = Page(render_html(*reported(text)))
    assert page.open == []
    assert [tag for tag, _ in page.elements] == PLAIN


@settings(max_examples=60, deadline=None, database=None)
@given(st.one_of(TEXTS, st.text(alphabet="`<b>\\ |[]()!*", max_size=20)))
def test_markdown_holds_no_element_of_what_was_read(text):
    tags = {tag for tag, _ in elements(render_markdown(*reported(text)))}
    assert not tags & {"b", "a", "img", "script", "style", "iframe"}
