"""The JSON Schemas of what commands write (reports, captures, records) and of the settings, from the types in use.

``python -m doctor.report.json_schemas`` writes them to ``doctor/schemas``, from where ``doctor schema`` prints them; a
test verifies that they match. Objects of documents may get further fields in later releases, so the schemas permit
unknown ones. Settings may not: there an unknown key is an error.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from doctor.core.capture import SCHEMA as CAPTURE_SCHEMA
from doctor.core.capture import CaptureDocument, section_keys
from doctor.core.check import FAMILIES
from doctor.core.facts import SECTIONS
from doctor.core.report_document import SCHEMA as REPORT_SCHEMA
from doctor.core.report_document import Report, ReportTool, RunReports
from doctor.core.settings import Settings, SettingsTable
from doctor.estimate.data_model import Estimate
from doctor.report.playbook import all_pages
from doctor.version import PACKAGE

Node = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SETTINGS_DIALECT = "http://json-schema.org/draft-04/schema#"
"""Taplo, the language server for TOML, promises the features of this draft
(https://taplo.tamasfe.dev/configuration/developing-schemas.html)."""
OWN_LIMIT = r"[A-Z]{2,12}[0-9]{3}"
"""The ids that a check may have, as :mod:`doctor.core.check` wants them."""


def report_schema() -> Node:
    """The schema of ``--format json``: one report, or those of several runs."""
    parts = _components([Report, RunReports, Estimate], "$defs")
    for name in ("Report", "RunReports"):
        parts[name]["properties"]["schema"] = {"const": REPORT_SCHEMA}
    estimate = {"$ref": "#/$defs/Estimate", "description": "The answer of `doctor estimate`; otherwise omitted."}
    parts["Report"]["properties"]["estimate"] = estimate
    choice = [{"$ref": "#/$defs/Report"}, {"$ref": "#/$defs/RunReports"}]
    return {"$schema": DIALECT, "title": "Report of rankdoctor", "anyOf": choice, "$defs": parts}


def capture_schema() -> Node:
    """The schema of what ``doctor capture`` writes."""
    schema = _job_schema("Capture of rankdoctor", "capture", ())
    schema["properties"]["expected"] = {"$ref": "#", "description": "The baseline, which is a capture, too."}
    return schema


def records_schema() -> Node:
    """The schema of the record that each rank of a watched run writes (``rank-3.json``)."""
    schema = _job_schema("Record of a rank of a run", "record", ("run",))
    del schema["properties"]["expected"]
    return schema


def _job_schema(title: str, kind: str, more: Iterable[str]) -> Node:
    parts = _components([CaptureDocument, ReportTool, *SECTIONS.values()], "$defs")
    del parts["JobDocument"]
    levels = {"CapturedHost": section_keys("host"), "CapturedRank": section_keys("rank")}
    for name, sections in levels.items():
        known = {key: {"$ref": f"#/$defs/{SECTIONS[key].__name__}"} for key in sections}
        parts[name]["properties"]["facts"] = {"type": "object", "properties": known}
        parts[name]["required"] = list(parts[name]["properties"])
    document = parts.pop("CaptureDocument")
    document["properties"] |= {
        "schema": {"const": CAPTURE_SCHEMA},
        "kind": {"const": kind},
        "tool": {"$ref": "#/$defs/ReportTool"},
    }
    always = ("schema", "kind", "tool", "created", "launcher", "world_size", "absent", "hosts", "ranks", *more)
    return {"$schema": DIALECT, **document, "title": title, "required": list(always), "$defs": parts}


def settings_schema() -> Node:
    """The schema of ``doctor.toml``. An unknown limit of a built-in check is an error, one of a plugin's is not."""
    parts = _components([SettingsTable], "definitions")
    del parts["IgnoreEntry"]["properties"]["by"]  # the reader sets it
    for part in parts.values():
        part["properties"] = {name: _without_null(value) for name, value in part["properties"].items()}
    table = parts.pop("SettingsTable")
    known = table["properties"]
    known["timeout"]["default"] = Settings().timeout
    known["select"]["items"] = parts["IgnoreEntry"]["properties"]["id"] = _selection()
    known["limits"] |= _limits()
    return {"$schema": SETTINGS_DIALECT, **table, "title": "Settings of rankdoctor", "definitions": parts}


def _without_null(node: Node) -> Node:
    """TOML has no null: what may be ``None`` is left out of a file."""
    choices = [one for one in node.get("anyOf", ()) if one != {"type": "null"}]
    if len(choices) != 1:
        return node
    return {**choices[0], **{name: value for name, value in node.items() if name not in ("anyOf", "default")}}


def _selection() -> Node:
    """An id or a family: the known ones, which editors suggest, or one of a plugin."""
    ids = [page.id for page in all_pages()]
    known = ["ALL", *FAMILIES, *FAMILIES.values(), *ids]
    plugins = {"type": "string", "minLength": 1}
    return {"description": "The id of a check or rule, its family, or ALL.", "anyOf": [{"enum": known}, plugins]}


def _limits() -> Node:
    """Limits as TOML has them: below the name of their check, or with both names in one quoted key."""
    number = {"type": "number"}
    inner: dict[str, Node] = {}
    joined: dict[str, Node] = {}
    for page in all_pages():
        for name, value in page.limits.items():
            limit = {**number, "description": f"{page.name}: {page.title}", "default": value}
            joined[name] = limit
            owner = {"type": "object", "description": page.title, "properties": {}, "additionalProperties": False}
            inner.setdefault(page.id, owner)["properties"][name.partition(".")[2]] = limit
    foreign = f"^(?!({'|'.join(FAMILIES)})[0-9]){OWN_LIMIT}"
    patterns = {
        rf"{foreign}\.\w+$": number,
        f"{foreign}$": {"type": "object", "additionalProperties": number},
    }
    return {"properties": {**inner, **joined}, "patternProperties": patterns, "additionalProperties": False}


def _components(types: Iterable[type], place: str) -> dict[str, Node]:
    """The schemas of the types and of all that they consist of, by name; ``place``: where the document holds them."""
    template = f"#/{place}/{{name}}"
    _, found = msgspec.json.schema_components(types, schema_hook=_any_value, ref_template=template)
    for node in found.values():
        if "description" in node:
            node["description"] = _plain(node["description"])
        if not node.get("required", True):  # draft 4 permits no empty list
            del node["required"]
    if "ReportTool" in found:  # or the schemas would change with every release
        del found["ReportTool"]["properties"]["version"]["default"]
    return found


def _any_value(kind: type) -> Node:
    """Values of any type; msgspec accepts no empty schema."""
    if kind is object:
        return {"description": "Any value."}
    raise NotImplementedError(kind)


def _plain(docstring: str) -> str:
    """A docstring in one paragraph, with the notation of Markdown."""
    words = re.sub(r":\w+:`~?([^`]+)`", r"``\1``", inspect.cleandoc(docstring))
    return " ".join(words.replace("``", "`").split())


SCHEMAS: Mapping[str, Callable[[], Node]] = {
    "report": report_schema,
    "capture": capture_schema,
    "records": records_schema,
    "settings": settings_schema,
}
"""Names of the schemas, as ``doctor schema`` takes them."""


def schema_text(name: str) -> str:
    """The schema of that name as it is committed."""
    return json.dumps(SCHEMAS[name](), indent=1, ensure_ascii=False) + "\n"


def write_schemas() -> None:
    """Rewrite the files in ``doctor/schemas``."""
    folder = Path(PACKAGE, "schemas")
    folder.mkdir(exist_ok=True)
    for name in SCHEMAS:
        (folder / f"{name}.json").write_text(schema_text(name), encoding="utf-8")


if __name__ == "__main__":
    write_schemas()
