"""The grammar of PYTORCH_ALLOC_CONF and of its older name PYTORCH_CUDA_ALLOC_CONF, by torch release.

Sources: torch c10/core/AllocatorConfig.h and .cpp, c10/cuda/CUDAAllocatorConfig.h and .cpp. The value is cut at ``,``,
``:``, ``[`` and ``]``; blanks do not count; what follows is ``key:value`` with a comma between two of them. torch
raises at the first use of CUDA for anything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Literal, NamedTuple, TypeGuard

import msgspec

from doctor.knowledge.data_files import read
from doctor.knowledge.environment_variables import LETTERS_PER_SLIP, slips
from doctor.knowledge.releases import release, within

_MAX_THREADS = 128  # CUDAAllocatorConfig::pinned_max_register_threads


class OptionInfo(msgspec.Struct, frozen=True):
    """An option: ``kind`` names the rule for its value, ``minimum`` is a bound; ``first`` and ``last``: releases of
    torch that accept it, as far as known; ``rocm``: the first one whose build for ROCm accepts this spelling beside
    the one with ``hip`` (pytorch/pytorch#110715); ``native``: the cudaMallocAsync backend ignores it. Options of
    pinned memory concern the host allocator (ATen/cuda/CachingHostAllocator.cpp), whichever backend allocates on the
    device."""

    kind: Literal["size", "flag", "fraction", "share", "threads", "backend", "divisions", "any"]
    minimum: int | None = None
    first: str | None = None
    last: str | None = None
    rocm: str | None = None
    native: bool = True


class AllocConfFault(msgspec.Struct, frozen=True):
    """The fault of a value. ``text`` completes ``NAME …``; ``option``: the option, empty if it is unknown; ``fix``: a
    replacement for the option; ``value``: or for the whole value; ``alternative``: another one for the whole value;
    ``harmless``: torch accepts it, with a warning or without effect; ``ignored``: without effect, and without a
    warning."""

    text: str
    option: str = ""
    fix: str = ""
    value: str = ""
    alternative: str = ""
    harmless: bool = False
    ignored: bool = False


class Option(NamedTuple):
    """One ``key:value``; brackets of a list are kept."""

    key: str
    value: str


@cache
def _options() -> dict[str, OptionInfo]:
    return read("allocator.json", dict[str, OptionInfo])


def split_options(text: str) -> tuple[list[Option], AllocConfFault | None]:
    """The options in ``text`` up to the first syntax error, and that error."""
    tokens = re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(r"\s", "", text))
    options: list[Option] = []
    position = 0
    while position < len(tokens):
        key = tokens[position]
        if key in (",", ":", "[", "]"):
            return options, AllocConfFault(f"has {key!r} instead of an option")
        if position + 2 >= len(tokens) or tokens[position + 1] != ":" or tokens[position + 2] in (",", ":", "]"):
            if "=" not in key:
                return options, AllocConfFault(f"has {key!r} without a value", key)
            text = f"has {key!r}: separate option and value with a colon"
            return options, AllocConfFault(text, fix=key.replace("=", ":"))
        value, position = _read_value(tokens, position + 2)
        options.append(Option(key, value))
        if value.startswith("[") and not value.endswith("]"):
            return options, AllocConfFault(f"has a list for {key} that is not closed", key, f"{key}:{value}]")
        if position < len(tokens) and tokens[position] != ",":
            return options, AllocConfFault(f"has {tokens[position]!r} instead of a comma after {key}:{value}", key)
        position += 1
    return options, None


def _read_value(tokens: list[str], position: int) -> tuple[str, int]:
    end = position + 1
    if tokens[position] == "[":
        end = tokens.index("]", position) + 1 if "]" in tokens[position:] else len(tokens)
    return "".join(tokens[position:end]), end


def alloc_conf_faults(text: str, torch: str | None = None, *, is_rocm: bool = False) -> Iterator[AllocConfFault]:
    """All faults of the value ``text`` under torch release ``torch``; if that is ``None``, the faults under every
    release. ``is_rocm``: that torch is built for ROCm."""
    plain = text.strip().strip("'\"")
    if plain != text.strip():
        yield AllocConfFault("has quotation marks, which must not be part of the value", fix=plain)
        text = plain
    options, broken = split_options(text)
    for option in options:
        if broken is None or broken.option != option.key:
            yield from (_judge_on_rocm(option, torch) if is_rocm else None) or _judge(option, torch)
    if broken:
        yield broken
    yield from _conflicts(dict(options), torch)


def _judge_on_rocm(option: Option, torch: str | None) -> list[AllocConfFault] | None:
    """The fault of a spelling that hipify had replaced in that build; ``None`` if the build accepts it."""
    info = _options().get(option.key)
    if info is None or info.rocm is None or torch is None or not within(torch, before=info.rocm):
        return None
    name = option.key.replace("cuda", "hip")
    text = f"has {option.key}; on ROCm it is {name}"
    return [AllocConfFault(text, option.key, f"{name}:{option.value}")]


def _judge(option: Option, torch: str | None) -> Iterator[AllocConfFault]:
    info = _options().get(option.key)
    if info is None:
        yield from _unknown(option, torch)
        return
    if torch is not None and not _takes(info, torch):
        is_new = info.first and within(torch, before=info.first)
        bound = f"requires PyTorch {info.first} or later" if is_new else f"PyTorch supports only up to {info.last}"
        yield AllocConfFault(f"has {option.key}, which {bound}", option.key)
        return
    if expected := _expected(info, option.value):
        text = f"has {option.key}:{option.value}, which must be {expected}"
        meant = _MEANT.get(option.value.lower()) if info.kind == "flag" else None
        yield AllocConfFault(text, option.key, f"{option.key}:{meant}" if meant else "")


_MEANT = {**dict.fromkeys(("true", "1", "yes", "on"), "True"), **dict.fromkeys(("false", "0", "no", "off"), "False")}


def _takes(info: OptionInfo, torch: str) -> bool:
    numbers = release(torch)[:2]
    if not numbers:
        return True
    if info.first and numbers < release(info.first):
        return False
    return not info.last or numbers <= release(info.last)


NEWEST_KNOWN = "2.15"
"""The newest torch release that the table covers: a newer one may have more options."""


def _unknown(option: Option, torch: str | None) -> Iterator[AllocConfFault]:
    text = f"has the unknown option {option.key!r}"
    if near := nearest_option(option.key):
        yield AllocConfFault(f"{text}. Did you mean {near}?", option.key, f"{near}:{option.value}")
    elif torch is None or release(torch)[:2] <= release(NEWEST_KNOWN):
        yield AllocConfFault(text, option.key)


def nearest_option(key: str) -> str | None:
    """The option that ``key`` is probably intended as: with a few typos, or with another suffix (``_mb``)."""
    wanted = key.lower().replace("-", "_")
    longer = [known for known in _options() if known.startswith(f"{wanted}_")]
    if len(longer) == 1:
        return longer[0]
    limit = max(1, len(wanted) // LETTERS_PER_SLIP)
    distance, best = min((slips(wanted, known, limit), known) for known in _options())
    return best if distance <= limit else None


def _expected(info: OptionInfo, value: str) -> str | None:
    """What the option takes; ``None`` if the value is valid."""
    number, decimal = _whole(value), _decimal(value)
    match info.kind:
        case "size" if number is None and not re.match(r"-\d", value):  # a negative number wraps around: no limit
            return "an integer (MiB)"
        case "size" if number is not None and number < (info.minimum or 0):
            return f"at least {info.minimum} (MiB)"
        case "flag" if value not in ("True", "False"):
            return "exactly True or False"
        case "fraction" if decimal is None or not 0.0 < decimal < 1.0:
            return "strictly between 0.0 and 1.0"
        case "share" if decimal is None or not 0.0 <= decimal <= 1.0:
            return "a number from 0.0 to 1.0"
        case "threads" if not _is_power_of_two(number) or number > _MAX_THREADS:
            return f"a power of two up to {_MAX_THREADS}"
        case "backend" if value not in ("native", "cudaMallocAsync", "hipMallocAsync"):
            return "native or cudaMallocAsync"
        case "divisions" if value.startswith("[") and not all(map(_is_division, value.strip("[]").split(","))):
            return "powers of two"
        case "divisions" if not value.startswith("[") and not _is_power_of_two(number):
            return "a power of two"
    return None


def _whole(value: str) -> int | None:
    """The number that torch's ``stoull`` reads: the leading digits, ignoring the rest."""
    match = re.match(r"\+?(\d+)", value)
    return int(match.group(1)) if match else None


def _decimal(value: str) -> float | None:
    match = re.match(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", value)
    return float(match.group()) if match else None


def _is_power_of_two(number: int | None) -> TypeGuard[int]:
    return number is not None and number > 0 and number & (number - 1) == 0


def _is_division(pair: str) -> bool:
    size, _, parts = pair.partition(":")
    return (size == ">" or _is_power_of_two(_whole(size))) and (_whole(parts) == 0 or _is_power_of_two(_whole(parts)))


def _conflicts(options: dict[str, str], torch: str | None) -> Iterator[AllocConfFault]:
    native = [key for key in options if key in _options() and _options()[key].native]
    if options.get("backend", "").endswith("MallocAsync") and native:
        kept = ",".join(f"{key}:{value}" for key, value in options.items() if key not in native)
        others = ",".join(f"{key}:{value}" for key, value in options.items() if key != "backend")
        yield AllocConfFault(
            f"has backend:{options['backend']}, which ignores {', '.join(native)}",
            value=kept,
            alternative=others,
            harmless=True,
        )
    if options.get("expandable_segments") == "True" and "max_split_size_mb" in options:
        # pytorch/pytorch#120022; get_free_block of CUDACachingAllocator.cpp applies it to free blocks all the same.
        yield AllocConfFault(
            "sets max_split_size_mb, which has no benefit with expandable_segments:True",
            value=",".join(f"{key}:{value}" for key, value in options.items() if key != "max_split_size_mb"),
            harmless=True,
            ignored=True,
        )
    collects = "garbage_collection_threshold" in options and options.get("expandable_segments") == "True"
    if collects and torch is not None and within(torch, before="2.5"):
        # pytorch/pytorch#134338, in 2.5: garbage collection released blocks of expandable segments as if by cudaFree.
        yield AllocConfFault(
            "has garbage_collection_threshold, which fails with expandable_segments",
            value=",".join(f"{key}:{value}" for key, value in options.items() if key != "garbage_collection_threshold"),
            harmless=True,
        )
    segment, split = _whole(options.get("large_segment_size_mb", "")), _whole(options.get("max_split_size_mb", ""))
    if segment is not None and split is not None and split < segment:
        yield AllocConfFault(
            f"has max_split_size_mb:{split} below large_segment_size_mb:{segment}", "max_split_size_mb"
        )
