"""The grammar of PYTORCH_ALLOC_CONF and of its older name PYTORCH_CUDA_ALLOC_CONF, by torch release.

Sources: torch c10/core/AllocatorConfig.h and .cpp, c10/cuda/CUDAAllocatorConfig.h and .cpp. The value is cut at ``,``,
``:``, ``[`` and ``]``; blanks do not count; what follows is ``key:value`` with a comma between two of them. torch
raises at the first use of CUDA for anything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import msgspec

from doctor.knowledge.data_files import read
from doctor.knowledge.environment_variables import LETTERS_PER_SLIP, slips
from doctor.knowledge.releases import release, within

_MAX_THREADS = 128  # CUDAAllocatorConfig::pinned_max_register_threads


class OptionInfo(msgspec.Struct, frozen=True):
    """An option: ``kind`` names the rule for its value, ``minimum`` is a bound; ``first`` and ``last``: releases of
    torch that accept it, as far as known; ``native``: the cudaMallocAsync backend ignores it. Options of pinned memory
    concern the host allocator (ATen/cuda/CachingHostAllocator.cpp), whichever backend allocates on the device."""

    kind: str
    minimum: int | None = None
    first: str | None = None
    last: str | None = None
    native: bool = True


class AllocConfFault(NamedTuple):
    """The fault of a value. ``text`` completes ``NAME …``; ``option``: the option, empty if it is unknown; ``fix``: a
    replacement for the option; ``value``: or for the whole value; ``harmless``: torch accepts it, with a warning or
    without effect."""

    text: str
    option: str = ""
    fix: str = ""
    value: str = ""
    harmless: bool = False


class Option(NamedTuple):
    """One ``key:value``; brackets of a list are kept."""

    key: str
    value: str


@cache
def _options() -> dict[str, OptionInfo]:
    return read("allocator.json", dict[str, OptionInfo])


def split_options(text: str) -> tuple[list[Option], AllocConfFault | None]:
    """The options in ``text`` up to the first syntax error, and that error."""
    tokens = _tokens(text)
    options: list[Option] = []
    position = 0
    while position < len(tokens):
        key = tokens[position]
        if key in (",", ":", "[", "]"):
            return options, AllocConfFault(f"has {key!r} where an option should begin")
        if position + 2 >= len(tokens) or tokens[position + 1] != ":" or tokens[position + 2] in (",", ":", "]"):
            return options, _no_value(key)
        value, position = _read_value(tokens, position + 2)
        options.append(Option(key, value))
        if value.startswith("[") and not value.endswith("]"):
            return options, AllocConfFault(f"has a list for {key} that is not closed", key, f"{key}:{value}]")
        if position < len(tokens) and tokens[position] != ",":
            return options, AllocConfFault(f"has {tokens[position]!r} behind {key}:{value}, where a comma belongs", key)
        position += 1
    return options, None


def _tokens(text: str) -> list[str]:
    return re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(r"\s", "", text))


def _no_value(key: str) -> AllocConfFault:
    if "=" in key:
        return AllocConfFault(f"has {key!r}: a colon belongs between option and value", fix=key.replace("=", ":"))
    return AllocConfFault(f"has {key!r} without a value", key)


def _read_value(tokens: list[str], position: int) -> tuple[str, int]:
    if tokens[position] != "[":
        return tokens[position], position + 1
    end = position
    while end < len(tokens) and tokens[end] != "]":
        end += 1
    return "".join(tokens[position : end + 1]), end + 1


def alloc_conf_faults(text: str, torch: str | None = None) -> Iterator[AllocConfFault]:
    """All faults of the value ``text`` under torch release ``torch``; if that is ``None``, the faults under every
    release."""
    plain = text.strip().strip("'\"")
    if plain != text.strip():
        yield AllocConfFault("has quotation marks, which belong to the shell and not to the value", fix=plain)
        text = plain
    options, broken = split_options(text)
    for option in options:
        if broken is None or broken.option != option.key:
            yield from _judge(option, torch)
    if broken:
        yield broken
    yield from _conflicts(dict(options))


def _judge(option: Option, torch: str | None) -> Iterator[AllocConfFault]:
    info = _options().get(option.key)
    if info is None:
        yield from _unknown(option, torch)
        return
    if torch is not None and not _takes(info, torch):
        bound = f"from {info.first} on" if info.first and within(torch, before=info.first) else f"up to {info.last}"
        yield AllocConfFault(f"has {option.key}, which torch takes {bound}; this is {torch}", option.key)
        return
    expected = _KINDS[info.kind](info, option.value)
    if expected:
        text = f"has {option.key}:{option.value}; it takes {expected}"
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
    near = nearest_option(option.key)
    is_newer = torch is not None and release(torch)[:2] > release(NEWEST_KNOWN)
    if near is None and is_newer:
        return
    fix = f"{near}:{option.value}" if near else ""
    hint = f"; near to {near}" if near else ""
    yield AllocConfFault(f"has the unknown option {option.key!r}{hint}", option.key, fix)


def nearest_option(key: str) -> str | None:
    """The option that ``key`` is probably intended as: with a few typos, or with another suffix (``_mb``)."""
    wanted = key.lower().replace("-", "_")
    longer = [known for known in _options() if known.startswith(f"{wanted}_")]
    if len(longer) == 1:
        return longer[0]
    limit = max(1, len(wanted) // LETTERS_PER_SLIP)
    distance, best = min((slips(wanted, known, limit), known) for known in _options())
    return best if distance <= limit else None


def _size(info: OptionInfo, value: str) -> str | None:
    number = _whole(value)
    minimum = info.minimum or 0
    if re.match(r"-\d", value):
        return None  # stoull wraps around: no limit
    if number is None:
        return "a whole number of MiB"
    return None if number >= minimum else f"at least {minimum} (MiB)"


def _whole(value: str) -> int | None:
    """The number that torch's ``stoull`` reads: the leading digits, ignoring the rest."""
    match = re.match(r"\+?(\d+)", value)
    return int(match.group(1)) if match else None


def _flag(info: OptionInfo, value: str) -> str | None:
    return None if value in ("True", "False") else "exactly True or False"


def _fraction(info: OptionInfo, value: str) -> str | None:
    number = _decimal(value)
    return None if number is not None and 0.0 < number < 1.0 else "a number between 0.0 and 1.0, both excluded"


def _share(info: OptionInfo, value: str) -> str | None:
    number = _decimal(value)
    return None if number is not None and 0.0 <= number <= 1.0 else "a number from 0.0 to 1.0"


def _decimal(value: str) -> float | None:
    match = re.match(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", value)
    return float(match.group()) if match else None


def _threads(info: OptionInfo, value: str) -> str | None:
    number = _whole(value)
    fits = number is not None and number <= _MAX_THREADS and _is_power_of_two(number)
    return None if fits else f"a power of two up to {_MAX_THREADS}"


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _backend(info: OptionInfo, value: str) -> str | None:
    return None if value in ("native", "cudaMallocAsync", "hipMallocAsync") else "native or cudaMallocAsync"


def _divisions(info: OptionInfo, value: str) -> str | None:
    if not value.startswith("["):
        number = _whole(value)
        return None if number is not None and _is_power_of_two(number) else "a power of two"
    pairs = [pair.partition(":") for pair in value.strip("[]").split(",")]
    if all(colon and _is_interval(size) and _is_division(parts) for size, colon, parts in pairs):
        return None
    return "a list such as [256:1,512:2,>:8]: sizes in MiB and divisions that are powers of two"


def _is_interval(text: str) -> bool:
    number = _whole(text)
    return text == ">" or (number is not None and _is_power_of_two(number))


def _is_division(text: str) -> bool:
    number = _whole(text)
    return number is not None and (number == 0 or _is_power_of_two(number))


def _anything(info: OptionInfo, value: str) -> str | None:
    return None


_KINDS: dict[str, Callable[[OptionInfo, str], str | None]] = {
    "size": _size,
    "flag": _flag,
    "fraction": _fraction,
    "share": _share,
    "threads": _threads,
    "backend": _backend,
    "divisions": _divisions,
    "any": _anything,
}
"""The expected value, or ``None`` if the value is valid, by the kind of option."""


def _conflicts(options: dict[str, str]) -> Iterator[AllocConfFault]:
    native = [key for key in options if key in _options() and _options()[key].native]
    if options.get("backend", "").endswith("MallocAsync") and native:
        kept = ",".join(f"{key}:{value}" for key, value in options.items() if key not in native)
        yield AllocConfFault(
            f"has backend:{options['backend']} and {', '.join(native)}: this backend ignores options of the native one",
            value=kept,
            harmless=options.get("expandable_segments") != "True",
        )
    segment, split = _whole(options.get("large_segment_size_mb", "")), _whole(options.get("max_split_size_mb", ""))
    if segment is not None and split is not None and split < segment:
        yield AllocConfFault(
            f"has max_split_size_mb:{split} below large_segment_size_mb:{segment}", "max_split_size_mb"
        )
