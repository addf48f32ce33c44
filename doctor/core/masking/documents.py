"""Masks secrets in whole records and documents, on input and output."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from doctor.core.decoding import prepared
from doctor.core.masking.secret_names import SecretConfidence, is_secret_name, secrecy
from doctor.core.masking.text_masking import REDACTED, mask_text
from doctor.core.masking.variable_masking import LONGEST, mask_value

R = TypeVar("R", bound=msgspec.Struct)

OWN_FIELDS = frozenset({"key", "keys", "auth", "access", "token", "tokens"})
"""Field names of our own records that do not indicate a secret."""

_NOT_TEXT = frozenset({"None", "Optional", "bool", "float", "int", "tuple"})
"""Words in annotations of fields that never hold text."""


def mask_record(record: R) -> R:
    """Return the record itself, or a copy in which secrets are masked."""
    if not holds_secret([record]):
        return record
    return msgspec.convert(mask_document(msgspec.to_builtins(record)), prepared(type(record)))


def masked_builtins(record: msgspec.Struct) -> Any:
    """Return the record as builtins in which secrets are masked."""
    document = msgspec.to_builtins(record)
    return mask_document(document) if holds_secret([record]) else document


def holds_secret(records: Sequence[object]) -> bool:
    """Whether :func:`mask_document` would change one of the records; encoded parts are not searched."""
    found = _Texts()
    for start in range(0, len(records), 256):  # as many as fit in a CPU cache
        found.collect(records[start : start + 256])
    return any(mask_text(text) != text for text in found.texts) or any(
        mask_value(name, value) != value for name, value in found.named
    )


class _Texts:
    """The distinct texts of records, and the values of variables and fields whose name matters, with that name.

    Collected field by field instead of record by record: thousands of ranks repeat most of their texts.
    """

    def __init__(self) -> None:
        self.texts: set[str] = set()
        self.named: set[tuple[str, str]] = set()

    def collect(self, values: Sequence[Any]) -> None:
        """Add the texts of ``values``: strings, records, and containers of them."""
        kinds: set[type[Any]] = set(map(type, values))
        for kind in kinds:
            same: Sequence[Any] = values if len(kinds) == 1 else [value for value in values if type(value) is kind]
            if issubclass(kind, str):
                self.texts.update(same)
            elif issubclass(kind, msgspec.Struct):
                columns = {shown: list(map(attrgetter(name), same)) for name, shown in _text_fields(kind)}
                self._add_fields(columns, zip(columns.get("name", ()), columns.get("value", ()), strict=False))
            elif issubclass(kind, dict):
                columns = {}
                for name, value in chain.from_iterable(fields.items() for fields in same):
                    columns.setdefault(name, []).append(value)
                self.collect(list(columns))
                self._add_fields(columns, ((fields.get("name"), fields.get("value")) for fields in same))
            elif issubclass(kind, (list, tuple, set, frozenset)):
                self.collect(list(chain.from_iterable(same)))

    def _add_fields(self, columns: dict[Any, list[Any]], variables: Iterable[tuple[Any, Any]]) -> None:
        """Add the texts of fields by their name. ``variables``: the fields ``name`` and ``value`` of each record."""
        for name, column in columns.items():
            self.collect(column)
            if _is_secret_field(name):
                self.named.update((name, value) for value in column if isinstance(value, str))
        for name, value in variables:
            if isinstance(name, str) and isinstance(value, str) and (is_secret_name(name) or len(value) > LONGEST):
                self.named.add((name, value))


@lru_cache(maxsize=512)
def _text_fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, str], ...]:
    """The fields that may hold text, each with its name in a document."""
    annotations: dict[str, object] = {}
    for base in reversed(kind.__mro__):
        annotations |= vars(base).get("__annotations__", {})
    names = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
    return tuple(pair for pair in names if not set(re.findall(r"\w+", str(annotations[pair[0]]))) <= _NOT_TEXT)


def _is_secret_field(name: object) -> bool:
    return isinstance(name, str) and name not in OWN_FIELDS and secrecy(name) is SecretConfidence.SURE


def mask_document(value: Any) -> Any:
    """Return builtins with secrets masked, by their form and their names; the same object if there is no secret."""
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, dict):
        return _mask_fields(value)
    if isinstance(value, (list, tuple)):
        masked = [mask_document(inner) for inner in value]
        return value if all(new is old for new, old in zip(masked, value, strict=True)) else type(value)(masked)
    return value


def _mask_fields(fields: dict[Any, Any]) -> dict[Any, Any]:
    masked = {}
    for name, inner in fields.items():
        is_secret = isinstance(inner, str) and inner not in ("", REDACTED) and _is_secret_field(name)
        masked[mask_text(name) if isinstance(name, str) else name] = REDACTED if is_secret else mask_document(inner)
    variable, text = fields.get("name"), fields.get("value")
    if isinstance(variable, str) and isinstance(text, str):
        masked["value"] = mask_value(variable, text)
    changed = any(new is not old for new, old in zip(masked.values(), fields.values(), strict=False))
    return masked if changed or len(masked) != len(fields) or list(masked) != list(fields) else fields
