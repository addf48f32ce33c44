"""Record what users and peers see of this tree as text files, so that two trees can be compared.

    python tests/golden/record.py OUTDIR [--only PART]...    write the corpus (parts: see PARTS)
    python tests/golden/record.py --digests                  rewrite digests.txt from the cheap parts
    python tests/golden/compare.py OLD NEW                   show the differences by entry
    python tests/golden/compare.py OLD NEW --listed tests/golden/changes.json      show those that are not listed

Entries are named by what is public: ids of checks, titles of cases, commands, fields of messages. What differs between
two runs on one tree (times, folders, the version) is masked.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
DIGESTS = Path(__file__).with_name("digests.txt")

IMPORTS = {
    "command line": "doctor.cli.main:app",
    "checks": "doctor.core.check_registry:builtin_checks",
    "catalog of checks": "doctor.core.check_registry:CheckRegistry",
    "run checks": "doctor.core.check_runner:examine_job",
    "load all checks": "doctor.session:load_checks",
    "settings": "doctor.core.settings:Settings",
    "report on a job": "doctor.session:judge",
    "capture of a job": "doctor.core.capture:to_document",
    "known log messages": "doctor.knowledge.log_patterns:known_patterns",
    "job of log lines": "doctor.testing:logged",
    "rules": "doctor.lint.engine.registry:builtin_rules",
}
"""All that is imported by name. A module or class that moves is changed here, and nowhere else."""

DATA = ROOT / "tests" / "data"
REPORTED = DATA / "reported_failures.jsonl"
CAPTURES = DATA / "captures"
TOOL_OUTPUTS = (DATA / "nvidia_smi", DATA / "ras", DATA / "nccl")
SCRIPTS = ROOT / "tests" / "lint" / "scripts"
MODELS = ROOT / "tests" / "estimate" / "models.py"

REPORT_FORMATS = {
    "json": ("--format", "json"),
    "text": ("--format", "text"),
    "text-verbose": ("--format", "text", "--verbose"),
    "text-quiet": ("--format", "text", "--quiet"),
    "html": ("--format", "html"),
    "markdown": ("--format", "markdown"),
    "junit": ("--format", "junit"),
    "github": ("--format", "github"),
    "json-redacted": ("--format", "json", "--redact"),
}
LINT_FORMATS = ("text", "json", "github", "sarif", "markdown", "junit", "html")
MEMORY = ("--device-memory", "80GiB", "--host-memory", "512GiB", "--timeout", "3600")
ESTIMATES = {
    "resnet_tiny-none.txt": ("resnet_tiny", *MEMORY),
    "resnet_tiny-fsdp.json": ("resnet_tiny", *MEMORY, "--devices", "8", "--strategy", "fsdp", "--format", "json"),
    "gpt_small-ddp.json": ("gpt_small", *MEMORY, "--devices", "2", "--precision", "bf16-mixed", "--format", "json"),
}

MASKS = (
    (re.compile(r'("seconds": )[\d.e+-]+(?=,\s+"(?:findings|exit_code)"|\s+\}\s+\}\s*\Z)'), r'\1"<time>"'),
    (re.compile(r"20\d\d-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|\+00:00| UTC)?(?=\W|$)"), "<time>"),
    (re.compile(r'\btime="[\d.]+"'), 'time="<time>"'),
    (re.compile(r"(?<=[;·,] )(?:[\d.]+ (?:ms|s|min)|[\d.]+ min [\d.]+ s)$", re.MULTILINE), "<time>"),
    (re.compile(r"\b(rankdoctor )\d+\.\d+[\w.+]*"), r"\1<version>"),
    (re.compile(r"(rankdoctor <version>[^.\n]*? )(?:\d+ min )?[\d.]+ (?:ms|s|min)\b"), r"\1<time>"),
    (re.compile(r'("name": "rankdoctor",\s*"(?:version|semanticVersion)": )"[^"]*"'), r'\1"<version>"'),
    (re.compile(r"\b(pid[ =:]+)\d{3,}(?= of this)"), r"\1<pid>"),
)
LARGE = 20_000
"""Characters of an embedded script or style sheet from which on only its digest is kept."""

Entries = Iterator[tuple[str, str]]
"""Pairs of a file's name and its text."""


def load(role: str) -> Any:
    """What :data:`IMPORTS` names for ``role``."""
    module, _, name = IMPORTS[role].partition(":")
    return getattr(importlib.import_module(module), name)


# --- text


def masked(text: str) -> str:
    """The text without what differs from run to run."""
    text = text.replace(str(Path.cwd()), "<folder>").replace(str(ROOT), "<tree>")
    text = re.sub(r"(<(script|style)\b[^>]*>)(.*?)(</\2>)", _short, text, flags=re.DOTALL)
    for pattern, mask in MASKS:
        text = pattern.sub(mask, text)
    return text


def _short(match: re.Match[str]) -> str:
    body = match[3]
    return match[0] if len(body) < LARGE else f"{match[1]}{len(body)} characters, {digest(body)}{match[4]}"


def digest(text: str) -> str:
    """Twelve hexadecimal digits that stand for the text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def plain(value: Any) -> dict[str, Any]:
    """The record as JSON has it, without when it was made."""
    document: dict[str, Any] = msgspec.to_builtins(value)
    return {name: one for name, one in document.items() if name not in ("seconds", "started")}


def as_lines(entries: Iterable[dict[str, Any]]) -> str:
    """One JSON line for each entry, sorted."""
    return "".join(sorted(json.dumps(entry, ensure_ascii=False, sort_keys=True) + "\n" for entry in entries))


def run(*arguments: object) -> str:
    """What a command prints, called in this process: exit code, standard output, standard error."""
    done = CliRunner().invoke(load("command line"), [str(one) for one in arguments], prog_name="doctor")
    error = "" if isinstance(done.exception, (SystemExit, type(None))) else f"{done.exception}\n"
    return _shown(done.exit_code, done.stdout, done.stderr + error)


def _shown(code: int, out: str, err: str) -> str:
    with_json = out.startswith("{") and "\n}\n{" not in out
    body = json.dumps(json.loads(out), indent=1, ensure_ascii=False) + "\n" if with_json else out
    return f"exit {code}\n" + (f"--- stderr\n{err}" if err else "") + f"--- stdout\n{body}"


# --- parts


def record_cases() -> Entries:
    """Every case of every check, judged by this check alone."""
    catalog, run_checks = load("catalog of checks"), load("run checks")
    for check in load("checks")():
        results = ((case, run_checks(case.sketch.job(), catalog((check,)))) for case in check.cases())
        yield f"cases/{check.id}.jsonl", as_lines({"case": case.name, **plain(result)} for case, (result,) in results)


def record_log_lines() -> Entries:
    """Every example of a known log message, judged by the check that its entry names."""
    catalog, run_checks, logged = load("catalog of checks"), load("run checks"), load("job of log lines")
    for check in load("checks")():
        lines = [line for one in load("known log messages")() if one.check == check.id for line in one.examples]
        results = ((line, run_checks(logged(line).job(), catalog((check,)))) for line in lines)
        if lines:
            yield f"log-lines/{check.id}.jsonl", as_lines({"case": line, **plain(one)} for line, (one,) in results)


def record_jobs() -> Entries:
    """Every case of every check, judged by all checks: verdict, root cause, and which finding explains which."""
    settings = load("settings")()
    catalog, judge = load("load all checks")(settings), load("report on a job")
    for check in load("checks")():
        reports = ((case.name, plain(judge(case.sketch.job(), catalog, settings))) for case in check.cases())
        yield f"jobs/{check.id}.jsonl", as_lines({"case": name, **_gist(report)} for name, report in reports)


def _gist(report: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in report.items() if key not in ("results", "tool", "schema", "inputs")}
    found = [one for one in report["results"] if one["findings"] or one["status"] == "error"]
    return {**kept, "found": {one["id"]: [_told(finding) for finding in one["findings"]] for one in found}}


def _told(finding: dict[str, Any]) -> dict[str, Any]:
    return {name: finding[name] for name in ("summary", "severity", "ranks", "confidence", "explained_by")}


def record_reported() -> Entries:
    """Every reported failure through ``diagnose``; every tenth in all formats."""
    for number, line in enumerate(REPORTED.read_text().splitlines()):
        failure = json.loads(line)
        log = Path("job.log")
        log.write_text(failure["text"])
        forms = REPORT_FORMATS if number % 10 == 0 else {"json": REPORT_FORMATS["json"]}
        for form, options in forms.items():
            yield f"reported/{failure['id']}.{form}", run("diagnose", *options, log)


def record_captures() -> Entries:
    """Every capture and every output of another tool in all formats."""
    for path in sorted(file for folder in (CAPTURES, *TOOL_OUTPUTS) for file in folder.iterdir() if file.is_file()):
        for form, options in REPORT_FORMATS.items():
            yield f"captures/{path.stem}.{form}", run("diagnose", *options, path)


def record_faults() -> Entries:
    """The first healthy and the first faulty case of each check, as captures: each report, and their difference."""
    catalog, run_checks, to_document = load("catalog of checks"), load("run checks"), load("capture of a job")
    for check in load("checks")():
        first: dict[bool, Path] = {}
        for case in check.cases():
            job = case.sketch.job()
            is_faulty = any(result.findings for result in run_checks(job, catalog((check,))))
            if job.evidence is None and is_faulty not in first:
                first[is_faulty] = Path(f"{'faulty' if is_faulty else 'healthy'}.json")
                first[is_faulty].write_bytes(msgspec.json.encode(to_document(job)))
        if len(first) == 2:
            for form, options in REPORT_FORMATS.items():
                yield f"faults/{check.id}.{form}", run("diagnose", *options, first[True])
            for form in ("text", "json", "markdown"):
                yield f"faults/{check.id}.diff-{form}", run("diff", "--format", form, first[False], first[True])


def record_help() -> Entries:
    """The help of all commands, the list of checks, and all pages of the playbook."""
    yield "help/doctor", run("--help")
    for name in re.findall(r"^  (\w+)  ", run("--help").partition("Commands:")[2], re.MULTILINE):
        yield f"help/{name}", run(name, "--help")
    yield "help/list.text", run("list")
    listed = run("list", "--format", "json")
    yield "help/list.json", listed
    for check_id in sorted(set(re.findall(r'"id": "(\w+)"', listed))):
        yield f"explain/{check_id}.md", run("explain", check_id)
        yield f"explain/{check_id}.json", run("explain", check_id, "--format", "json")


def record_lint() -> Entries:
    """``lint`` over the scripts of its tests and over the cases of all rules."""
    for script in sorted(SCRIPTS.glob("*.py")):
        text = script.read_text()
        copy = Path(script.name)
        copy.write_text(text)
        for form in LINT_FORMATS:
            yield f"lint/{script.stem}.{form}", run("lint", "--format", form, copy)
        yield f"lint/{script.stem}.diff", run("lint", "--diff", copy)
    yield from _lint_cases()


def _lint_cases() -> Entries:
    """Each case is a project of its own: what others import or start changes what rules find."""
    for rule in sorted(load("rules")(), key=lambda rule: rule.id):
        found = []
        for case in rule.cases():
            file = Path("cases", rule.id, digest(case.title + case.text), case.name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(case.text)
            beside = [file.parent / name for name, _ in case.beside]
            for other, (_, text) in zip(beside, case.beside, strict=True):
                other.parent.mkdir(parents=True, exist_ok=True)
                other.write_text(text)
            options = _lint_options(case)
            hits = _hits([file, *beside], options)
            patch = run("lint", "--diff", "--select", rule.id, *options, file) if hits else ""
            found.append({"case": case.title, "options": options, "hits": hits, "patch": _hunks(patch)})
        yield f"lint-cases/{rule.id}.jsonl", as_lines(found)


def _lint_options(case: Any) -> tuple[str, ...]:
    lightning = dict(case.releases).get("lightning")
    cores = ("--cores", str(case.processors)) if case.processors else ()
    return (*(("--lightning", lightning) if lightning else ()), *cores)


def _hits(files: list[Path], options: tuple[str, ...]) -> list[dict[str, Any]]:
    """The findings of all rules in files, those in preview too."""
    _, _, text = run("lint", "--format", "json", "--preview", *options, *files).partition("--- stdout\n")
    findings = [(result["id"], finding) for result in json.loads(text)["results"] for finding in result["findings"]]
    return [{"id": id_, "line": finding.pop("source")["line"], **plain(finding)} for id_, finding in findings]


def _hunks(patch: str) -> str:
    return patch[patch.find("@@") :] if "@@" in patch else ""


def record_estimates() -> Entries:
    """Estimates of a few models, each in a process of its own as users run them."""
    for name, (model, *options) in ESTIMATES.items():
        command = [sys.executable, "-m", "doctor", "estimate", f"{MODELS}:{model}", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        # How often the progress is shown depends on how long it takes.
        shown = re.sub(r"(?m)^doctor: .* … \d+ s\n", "", done.stderr)
        yield f"estimate/{name}", _shown(done.returncode, done.stdout, shown)


def record_wire() -> Entries:
    """One instance of every record that can be encoded, as MessagePack, by its tag and fields: the messages among them
    stay as they are. ``least``: with nothing but the fields that are required."""
    entries = []
    for kind in _structs():
        try:
            full, least = _instance(kind, False), _instance(kind, True)
            entries.append({"case": _signature(kind), "full": _packed(full), "least": _packed(least)})
        except (NameError, TypeError, _Unsampled):
            continue  # it holds something that never leaves the process
    unique = {json.dumps(entry, sort_keys=True): entry for entry in entries}
    yield "wire/messages.jsonl", as_lines(unique.values())


class _Unsampled(Exception):
    """A type of which no example can be made."""


def _structs() -> Iterator[type[msgspec.Struct]]:
    package = importlib.import_module("doctor")
    for info in pkgutil.walk_packages(package.__path__, "doctor."):
        if not info.name.endswith("__main__"):
            try:
                importlib.import_module(info.name)
            except ImportError:
                continue  # an extra is not installed
    seen, waiting = set(), [msgspec.Struct]
    while waiting:
        for kind in waiting.pop().__subclasses__():
            if kind not in seen:
                seen.add(kind)
                waiting.append(kind)
                if kind.__module__.partition(".")[0] == "doctor":
                    yield kind


def _signature(kind: type[msgspec.Struct]) -> str:
    config = kind.__struct_config__
    tag = f"{config.tag}: " if config.tag is not None else ""
    fields = ", ".join(kind.__struct_encode_fields__)
    return f"{tag}[{fields}]" if config.array_like else f"{tag}{{{fields}}}"


def _packed(message: msgspec.Struct) -> dict[str, Any]:
    data = msgspec.msgpack.encode(message)
    try:
        returns = msgspec.msgpack.encode(msgspec.msgpack.decode(data, type=type(message))) == data
        decoded = msgspec.to_builtins(msgspec.msgpack.decode(data), str_keys=True)
    except msgspec.DecodeError as error:
        return {"bytes": data.hex(), "decoded": None, "returns": str(error)}
    return {"bytes": data.hex(), "decoded": decoded, "returns": returns}


def _instance(kind: type[msgspec.Struct], only_required: bool, depth: int = 0) -> msgspec.Struct:
    values = {
        field.name: _sample(field.type, depth)
        for field in msgspec.inspect.type_info(kind).fields  # type: ignore[attr-defined]
        if field.required or not only_required
    }
    return kind(**values)


TEXTS = ("a", "0123456789abcdef", "1", "a-1", "a.b", "10.0.0.1", "00:11:22:33:44:55", "abcd", "A", "a_b")


def _sample(kind: Any, depth: int) -> Any:
    """A value of that type, always the same one."""
    name = type(kind).__name__
    make = SAMPLES.get(name)
    if make is None or depth > 8:
        raise _Unsampled(name)
    return make(kind, depth + 1)


def _number(kind: Any, _: int) -> int:
    least = kind.ge if kind.ge is not None else kind.gt + 1 if kind.gt is not None else 3
    below = [bound for bound in (kind.le, kind.lt - 1 if kind.lt is not None else None) if bound is not None]
    return min([max(int(least), 3), *map(int, below)])


def _text(kind: Any, _: int) -> str:
    fits = (
        text
        for text in TEXTS
        if (not kind.pattern or re.search(kind.pattern, text)) and len(text) <= (kind.max_length or 99)
    )
    found = next(fits, None)
    if found is None:
        raise _Unsampled(kind.pattern)
    return found


def _union(kind: Any, depth: int) -> Any:
    for option in kind.types:
        if type(option).__name__ not in ("NoneType", "CustomType"):
            return _sample(option, depth)
    raise _Unsampled("union")


def _several(kind: Any, depth: int) -> list[Any]:
    return [_sample(kind.item_type, depth)]


SAMPLES: dict[str, Callable[[Any, int], Any]] = {
    "AnyType": lambda *_: "any",
    "NoneType": lambda *_: None,
    "BoolType": lambda *_: True,
    "IntType": _number,
    "FloatType": lambda kind, depth: _number(kind, depth) + (0.5 if kind.le is None else 0.0),
    "StrType": _text,
    "BytesType": lambda *_: b"ab",
    "RawType": lambda *_: msgspec.Raw(b"\xa1a"),
    "EnumType": lambda kind, _: next(iter(kind.cls)),
    "LiteralType": lambda kind, _: kind.values[0],
    "StructType": lambda kind, depth: _instance(kind.cls, False, depth),
    "ListType": _several,
    "VarTupleType": lambda kind, depth: tuple(_several(kind, depth)),
    "SetType": lambda kind, depth: set(_several(kind, depth)),
    "FrozenSetType": lambda kind, depth: frozenset(_several(kind, depth)),
    "TupleType": lambda kind, depth: tuple(_sample(one, depth) for one in kind.item_types),
    "NamedTupleType": lambda kind, depth: kind.cls(*(_sample(field.type, depth) for field in kind.fields)),
    "DictType": lambda kind, depth: {_sample(kind.key_type, depth): _sample(kind.value_type, depth)},
    "UnionType": _union,
}

PARTS: dict[str, Callable[[], Entries]] = {
    "cases": record_cases,
    "log-lines": record_log_lines,
    "help": record_help,
    "wire": record_wire,
    "jobs": record_jobs,
    "reported": record_reported,
    "captures": record_captures,
    "faults": record_faults,
    "lint": record_lint,
    "estimate": record_estimates,
}
CHEAP = ("cases", "log-lines", "help", "wire")
"""Parts whose digests are committed."""


# --- the command


def in_clean_surroundings(work: Callable[[], Any]) -> Any:
    """Call ``work`` in an empty folder, with an environment that says nothing of this machine."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    before, here = dict(os.environ), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        folder = os.path.realpath(folder)
        os.environ.clear()
        os.environ.update(kept, HOME=folder, TMPDIR=folder, LC_ALL="C.UTF-8", TZ="UTC", COLUMNS="120")
        os.chdir(folder)
        try:
            return work()
        finally:
            os.chdir(here)
            os.environ.clear()
            os.environ.update(before)


def entries_of(parts: Iterable[str]) -> Entries:
    """All entries of these parts, masked."""
    for part in parts:
        for name, text in PARTS[part]():
            yield name, masked(text)


def digests() -> dict[str, str]:
    """The digest of each entry of the cheap parts; pages and help texts by folder."""
    texts: dict[str, list[str]] = defaultdict(list)
    for name, text in in_clean_surroundings(lambda: list(entries_of(CHEAP))):
        texts[name.rpartition(".")[0] or name].append(text)
    return {name: digest("\0".join(found)) for name, found in sorted(texts.items())}


def _write(folder: Path, parts: Iterable[str]) -> int:
    count = 0
    for name, text in entries_of(parts):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        count += 1
    return count


def main() -> None:
    """Write the corpus, or the digests."""
    parser = argparse.ArgumentParser(description="Record what users and peers see of this tree.")
    parser.add_argument("folder", nargs="?", type=Path, metavar="OUTDIR")
    parser.add_argument("--only", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument(
        "--digests",
        nargs="?",
        type=Path,
        const=DIGESTS,
        metavar="FILE",
        help=f"write the digests of the cheap parts instead, by default to {DIGESTS.name}",
    )
    asked = parser.parse_args()
    if asked.digests:
        asked.digests.write_text("".join(f"{name} {value}\n" for name, value in digests().items()))
        print(f"wrote {asked.digests}")
    elif asked.folder is None:
        parser.error("OUTDIR or --digests is required")
    elif asked.folder.exists() and any(asked.folder.iterdir()):
        parser.error(f"{asked.folder} is not empty")
    else:
        folder = asked.folder.resolve()
        print(in_clean_surroundings(lambda: _write(folder, asked.only or PARTS)), "entries in", folder)


if __name__ == "__main__":
    main()
