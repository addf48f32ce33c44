"""Masks secrets in whole records and documents, on their way in and out."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from doctor.core.decoding import prepared
from doctor.core.masking.secret_names import SecretConfidence, secrecy
from doctor.core.masking.text_masking import REDACTED, mask_text
from doctor.core.masking.variable_masking import mask_value

R = TypeVar("R", bound=msgspec.Struct)

OWN_FIELDS = frozenset({"key", "keys", "auth", "access", "token", "tokens"})
"""Names of fields of our own records, which announce no secret."""


def mask_record(record: R) -> R:
    """The record itself, or a copy in which secrets are masked."""
    plain = msgspec.to_builtins(record)
    masked = mask_document(plain)
    return record if masked is plain else msgspec.convert(masked, prepared(type(record)))


def mask_document(value: Any) -> Any:
    """Plain dictionaries, lists and strings with secrets masked; the very same object where nothing was to be masked.

    A string is masked by its form, and by the name of the variable or field whose value it is.
    """
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, dict):
        return _mask_fields(value)
    if isinstance(value, (list, tuple)):
        masked = [mask_document(inner) for inner in value]
        return value if all(new is old for new, old in zip(masked, value, strict=True)) else type(value)(masked)
    return value


def _mask_fields(fields: dict[Any, Any]) -> dict[Any, Any]:
    masked = {_mask_name(name): _mask_field(name, inner) for name, inner in fields.items()}
    variable, text = fields.get("name"), fields.get("value")
    if isinstance(variable, str) and isinstance(text, str):
        masked["value"] = mask_value(variable, text)
    changed = any(new is not old for new, old in zip(masked.values(), fields.values(), strict=False))
    return masked if changed or len(masked) != len(fields) or list(masked) != list(fields) else fields


def _mask_name(name: Any) -> Any:
    return mask_text(name) if isinstance(name, str) else name


def _mask_field(name: Any, value: Any) -> Any:
    if isinstance(value, str) and value and isinstance(name, str) and name not in OWN_FIELDS:
        if secrecy(name) is SecretConfidence.SURE:
            return REDACTED if value != REDACTED else value
    return mask_document(value)
