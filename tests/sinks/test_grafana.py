"""The dashboard against the documented fields of Grafana's dashboard model and against what is really exported."""

import itertools
import json
import re
import subprocess
import sys

from doctor.monitor.sinks.grafana import dashboard
from doctor.monitor.sinks.prometheus import GAUGES
from doctor.monitor.sinks.report_metrics import REPORT_GAUGES
from tests.lab.cases import each_case
from tests.lab.speed import patience

DOCUMENT = json.loads(dashboard())
PANELS = DOCUMENT["panels"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]
VARIABLES = {one["name"]: one for one in DOCUMENT["templating"]["list"]}
EXPRESSIONS = [target["expr"] for target in TARGETS] + [
    one["query"]["query"] for one in VARIABLES.values() if one["type"] == "query"
]
EXPORTED = {gauge.name for gauge in (*GAUGES, *REPORT_GAUGES)}
LABELS = {"job", "rank", "host", "cause", "id", "name", "severity"}

FIELDS = {
    "dashboard": (
        "title uid description tags schemaVersion version editable graphTooltip refresh time timezone timepicker "
        "weekStart fiscalYearStartMonth liveNow links annotations templating panels"
    ),
    "panel": "id type title description datasource gridPos targets fieldConfig options transformations",
    "target": "datasource editorMode expr legendFormat range refId format instant",
    "variable": (
        "name label type datasource query current hide includeAll allValue multi options refresh regex skipUrlSync sort"
    ),
    "options of stat": "colorMode graphMode justifyMode orientation textMode reduceOptions",
    "options of timeseries": "legend tooltip",
    "options of table": "cellHeight showHeader",
    "defaults": "color custom mappings noValue thresholds unit min max",
}
"""Of the dashboard kind and the panels' own, of schema version 39."""


def unknown_fields(name, thing):
    return set(thing) - set(FIELDS[name].split())


def test_it_has_documented_fields_alone():
    assert not unknown_fields("dashboard", DOCUMENT)
    for panel in PANELS:
        assert not unknown_fields("panel", panel)
        assert not unknown_fields(f"options of {panel['type']}", panel["options"])
        assert not unknown_fields("defaults", panel["fieldConfig"]["defaults"])
    assert not set().union(*(unknown_fields("target", target) for target in TARGETS))
    assert not set().union(*(unknown_fields("variable", one) for one in VARIABLES.values()))


def test_panels_lie_beside_each_other_on_the_grid():
    taken = set()
    for panel in PANELS:
        x, y, w, h = (panel["gridPos"][side] for side in "xywh")
        assert x >= 0
        assert x + w <= 24
        cells = set(itertools.product(range(x, x + w), range(y, y + h)))
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len(taken) == 24 * (1 + max(y for _, y in taken))
    assert len({panel["id"] for panel in PANELS}) == len({panel["title"] for panel in PANELS}) == len(PANELS)


def test_the_data_source_is_a_variable_everywhere():
    assert VARIABLES["datasource"]["type"] == "datasource"
    assert VARIABLES["datasource"]["query"] == "prometheus"
    asked = [one["datasource"] for one in (*PANELS, *TARGETS)]
    asked += [one["datasource"] for one in VARIABLES.values() if one["type"] == "query"]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in asked)


def test_every_query_asks_for_what_is_exported_and_nothing_is_exported_in_vain():
    asked = {name for expression in EXPRESSIONS for name in re.findall(r"rankdoctor_\w+", expression)}
    assert asked == EXPORTED


@each_case("expression", sorted(set(EXPRESSIONS)))
def test_queries_use_variables_and_labels_that_there_are(expression):
    assert set(re.findall(r"\$(\w+)", expression)) <= set(VARIABLES)
    assert expression.count("(") == expression.count(")")
    for selector in re.findall(r"\{(.*?)\}", expression):
        assert set(re.findall(r"(\w+)=", selector)) <= LABELS
    for labels in re.findall(r"\b(?:by|on) \((.*?)\)", expression):
        assert set(labels.split(", ")) <= LABELS - {"job"}


def test_the_same_rank_from_two_hosts_is_one_line():
    """The rank that judges serves all ranks, and each host serves one of its own."""
    for target in TARGETS:
        for name in re.findall(r"rankdoctor_\w+", target["expr"]):
            assert re.search(rf"\b(max|min)( by \([a-z, ]+\))? ?\({name}\{{", target["expr"]), target["expr"]


def test_letters_of_a_panel_and_its_legends():
    for panel in PANELS:
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
        for target in panel["targets"]:
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= {"rank", "host", "cause"}


def test_it_is_printed_by_a_command():
    printed = subprocess.run(
        [sys.executable, "-m", "doctor.monitor.sinks.grafana"],
        capture_output=True,
        text=True,
        check=True,
        timeout=patience(60),
    )
    assert json.loads(printed.stdout) == DOCUMENT
