"""How NCCL and torch interpret the value of a variable.

Sources: NCCL src/misc/param.cc (``strtoll`` with base 0: text counts as 0, without a message), src/graph/tuning.cc
(``parseList``), src/graph/paths.cc (``ncclGetLevel``), src/init.cc, src/debug.cc, src/misc/socket.cc; torch
torch/csrc/distributed/c10d/Utils.hpp (``getCvarBool``, ``getCvarInt``) and debug.cpp.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

import msgspec

from doctor.core.text import lazy_compile
from doctor.knowledge.environment_variables import VariableInfo, known
from doctor.knowledge.interface_syntax import parse_nccl_integer
from doctor.knowledge.releases import within


class ValueFault(msgspec.Struct, frozen=True):
    """Why a value is not valid. ``problem`` completes ``NAME=value …``; ``expected``: valid values; ``mild``: the value
    still has its probably intended effect, or costs the job nothing but the setting; ``harmless``: every part that has
    an effect is valid; ``ignored``: the parts of a list without effect."""

    problem: str
    expected: str
    mild: bool = False
    harmless: bool = False
    ignored: tuple[str, ...] = ()


_NUMBER = lazy_compile(r"\s*([+-]?)(?:0[xX]([0-9a-fA-F]+)|(0[0-7]*)|([1-9]\d*))")


def is_number(text: str) -> bool:
    """Whether all of ``text`` except surrounding blanks is a number to ``strtoll``."""
    match = _NUMBER.match(text)
    return match is not None and not text[match.end() :].strip()


def fault(name: str, value: str, *, release: str | None = None) -> ValueFault | None:
    """The fault of ``value`` for the known variable ``name``; ``None`` if it is valid, or if no strict rule is known.
    ``release``: that of the reader, if the rule depends on it and it is known."""
    info = known(name)
    if info is None:
        return None
    if info.reader == "nccl" and value == "":
        return None  # NCCL treats an empty value as unset, and ignores most empty words
    return _RULES[info.grammar](info, name, value, release)


def effective(name: str, value: str | None) -> str | None:
    """The effective value in a canonical spelling: ``0x10`` and ``16`` are equal, and so are a default and an explicit
    equal value. ``None`` stands for a variable that is not set and has no literal default."""
    info = known(name)
    if value is None or (info is not None and info.reader == "nccl" and value == ""):
        value = info.default if info else None
    if value is None or info is None:
        return value
    if info.grammar in ("number", "flag"):
        return str(parse_nccl_integer(value, 0))
    if info.grammar in ("torch-flag", "wide-flag"):
        return _TRUTH.get(value.strip().lower(), value)
    return value.casefold() if info.grammar in ("word", "words", "algorithms", "protocols", "torch-word") else value


_TRUTH = {**dict.fromkeys(("y", "yes", "1", "t", "true"), "1"), **dict.fromkeys(("n", "no", "0", "f", "false"), "0")}


def _simple(info: VariableInfo, name: str, value: str, release: str | None) -> ValueFault | None:
    """The rules that need one line."""
    match info.grammar:
        case "exact-word" if value not in info.words:
            expected = f"{' or '.join(info.words)}, in capitals"
            return ValueFault("is not a valid value: NCCL silently ignores it", expected)
        case "path-level" if value not in info.words and not value[:1].isdigit():
            expected = f"one of {', '.join(info.words)} in capitals, or 0 to 5"
            return ValueFault("is not a valid level: NCCL silently ignores it", expected)
        case "protocols":
            return _choice(value, {word.casefold() for word in PROTOCOLS}, PROTOCOLS, release)
        case "network-policy" if not re.fullmatch(r"AUTO|ALL|MAX:0*[1-9]\d*", value, re.IGNORECASE):
            return ValueFault("is not a valid value: NCCL uses AUTO", "AUTO, ALL or MAX:<number>")
        case "address" if not (found := _ADDRESS.fullmatch(value)) or int(found[1]) > 65535:  # the highest TCP port
            return ValueFault("is not an address with a port", "HOST:PORT, or [IPv6]:PORT")
        case "torch-flag" if value.lower() not in _TRUTH:
            return ValueFault("is not a boolean: PyTorch rejects it", "0 or 1")
        case "torch-word" if value.upper() not in info.words:
            return ValueFault(
                "is not a valid value: PyTorch rejects it on import",
                f"{', '.join(info.words[:-1])} or {info.words[-1]}",
            )
    return None


_ADDRESS = lazy_compile(r"(?:\[[0-9a-fA-F:.]+(?:%\w+)?\]|[^\s\[\]:]+):(\d{1,5})")


def _number(info: VariableInfo, name: str, value: str, release: str | None) -> ValueFault | None:
    number = parse_nccl_integer(value, 0)
    if not is_number(value):
        return ValueFault(f"is not a number: NCCL reads it as {number}", _range(info))
    if number in (-1, -2):
        return None  # NCCL's values for "automatic"
    if _is_outside(info, number):
        kept = number & info.bits if info.bits else 0
        if kept > 0:
            return ValueFault(f"is out of range: mlx5 devices truncate it to {kept}", _range(info), harmless=True)
        if info.unlimited is not None and info.unlimited <= number < 1 << 8:  # uint8_t of ibv_qp_attr
            return ValueFault("sets no time limit: NCCL waits indefinitely", _range(info), mild=True)
        return ValueFault(f"is out of range{_replaced(info)}", _range(info), mild=info.is_replaced)
    if info.step and number % info.step:
        return ValueFault(f"is not a multiple of {info.step}{_replaced(info)}", _range(info), mild=info.is_replaced)
    return None


def _replaced(info: VariableInfo) -> str:
    return ": NCCL replaces it" if info.is_replaced else ""


def _is_outside(info: VariableInfo, number: int) -> bool:
    below = info.minimum is not None and number < info.minimum
    return below or (info.maximum is not None and number > info.maximum)


def _range(info: VariableInfo) -> str:
    low, high = info.minimum, info.maximum
    step = f", a multiple of {info.step}" if info.step else ""
    if low is None and high is None:
        return "an integer"
    if high is None:
        return f"an integer of at least {low}{step}"
    return f"an integer from {low} to {high}{step}"


def _flag(info: VariableInfo, name: str, value: str, release: str | None) -> ValueFault | None:
    number = parse_nccl_integer(value, 0)
    if not is_number(value):
        effect = "turns it on" if number else "disables nothing" if "DISABLE" in name else "leaves it off"
        return ValueFault(f"is not a number: NCCL reads it as {number} and {effect}", "0 or 1")
    if number in (-2, -1, 0, 1):
        return None
    if name == "NCCL_P2P_DISABLE":
        return ValueFault("has no effect: only 1 disables P2P", "0 or 1")
    since = _ONLY_ONE_SINCE.get(name)
    if since is not None and release is None:
        problem = f"is neither 0 nor 1: NCCL treats it as 0 since {since}, and as 1 before"
        return ValueFault(problem, "0 or 1", mild=True)
    is_compared = name in _ONLY_ONE or (since is not None and release is not None and within(release, first=since))
    taken = 0 if is_compared else 1
    return ValueFault(f"is neither 0 nor 1: NCCL treats it as {taken}", "0 or 1", mild=True)


_ONLY_ONE = frozenset(
    {
        *("NCCL_ALLOC_P2P_NET_LL_BUFFERS", "NCCL_CHECK_POINTERS", "NCCL_DEV_API_JIT", "NCCL_GDRCOPY_ENABLE"),
        *("NCCL_GDRCOPY_FIFO_ENABLE", "NCCL_NET_DISABLE_INTRA", "NCCL_RAS_ENABLE", "NCCL_SET_STACK_SIZE"),
        "NCCL_SHM_DISABLE",
    }
)
"""Flags that NCCL compares with 1 (``ncclParamShmDisable() == 1`` in src/transport/shm.cc, and so on); the others count
unless they are 0."""
_ONLY_ONE_SINCE = {"NCCL_IB_SPLIT_DATA_ON_QPS": "2.29.2"}
"""Flags that a release began to compare with 1 (``splitDataOnQps == 1`` in src/transport/net_ib/)."""


def _wide_flag(info: VariableInfo, name: str, value: str, release: str | None) -> ValueFault | None:
    """A bool in the parameter system introduced with NCCL 2.30, a number before."""
    if is_number(value):
        return _flag(info, name, value, release)
    word = value.casefold() in ("t", "true", "f", "false")
    if word and (release is None or not within(release, before="2.30")):
        return None
    return ValueFault("is not a valid value: NCCL uses the default", "0 or 1")


def _word(info: VariableInfo, name: str, value: str, release: str | None) -> ValueFault | None:
    harmless = name == "NCCL_DEBUG" and value.casefold() in ("none", "off", "0")
    if harmless or value.casefold() in {word.casefold() for word in info.words}:
        return None
    is_level = name == "NCCL_DEBUG"
    effect = "NCCL writes no log" if is_level else "NCCL uses the default"
    # No level affects the job: only messages are lost (src/debug.cc). A quiet log is what these words ask for, so that
    # nothing is lost, as with NCCL_DEBUG_SUBSYS=WARN.
    quiet = is_level and value.casefold() in ("error", "fatal", "critical", "quiet")
    expected = " or ".join(filter(None, (", ".join(info.words[:-1]), info.words[-1])))
    return ValueFault(f"is not a valid value: {effect}", expected, mild=is_level, harmless=quiet)


def _words(info: VariableInfo, name: str, value: str, release: str | None) -> ValueFault | None:
    """What is logged, and how. An unknown word has no effect (src/debug.cc); since 2.30.7, it makes the whole list
    invalid, and the default applies (``bitsetResolve`` in src/include/param/parser_bitset.h)."""
    allowed = {word.casefold() for word in info.words}
    words = [word for word in value.removeprefix("^").split(",") if word]
    unknown = [word for word in words if word.strip().casefold() not in allowed]
    if not unknown:
        return None
    expected = f"a list of {', '.join(info.words)}"
    if release is not None and within(release, first="2.30.7"):
        problem = f"contains {_quoted(unknown)}: NCCL ignores the whole list"
        if len(unknown) == len(words):
            problem = "is not a valid value: NCCL uses the default list"
        return ValueFault(problem, expected, mild=True, harmless=True, ignored=tuple(unknown))
    if len(unknown) < len(words):
        problem = f"contains {_quoted(unknown)}, which NCCL ignores"
        return ValueFault(problem, expected, mild=True, harmless=True, ignored=tuple(unknown))
    # No bit of the mask is set, and ncclDebugLog() returns before it prints any line. The job is unaffected.
    return ValueFault("is not a valid value: NCCL logs nothing, not even warnings", expected, mild=True, harmless=True)


COLLECTIVES = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
PROTOCOLS = ("LL", "LL128", "Simple")
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
FIRST_WITH_PAT = "2.23.4"
"""The first NCCL that has the PAT algorithm."""
STRICT_LISTS = "2.24.3"
"""The first NCCL whose parseList accepts lists per collective and rejects an unknown word."""


def _algorithms(info: VariableInfo, name: str, value: str, release: str | None) -> ValueFault | None:
    allowed = {word.casefold() for word in ALGORITHMS}
    if release is None or within(release, before="2.14"):
        allowed.add("collnet")
    if release is not None and within(release, before=FIRST_WITH_PAT):
        allowed.discard("pat")
    return _choice(value, allowed, ALGORITHMS, release) or _uncovered(value, allowed, release)


_ONLY_RING = frozenset({"ring"})
_GATHERING = frozenset({"ring", "nvls", "collnetdirect", "pat"})
_SERVED_BY = {
    "broadcast": _ONLY_RING,
    "reduce": _ONLY_RING,
    "allgather": _GATHERING,
    "reducescatter": _GATHERING,
    "allreduce": frozenset(word.casefold() for word in ALGORITHMS) - {"pat"} | {"collnet"},
}
"""Algorithms that NCCL implements for each collective (src/graph/tuning.cc ncclTopoTuneModel)."""


def _uncovered(value: str, allowed: set[str], release: str | None) -> ValueFault | None:
    """A list that leaves a collective without an algorithm: from 2.24 on, NCCL fails the call (src/enqueue.cc)."""
    if release is not None and within(release, before=STRICT_LISTS):
        return None
    enabled = dict.fromkeys(_SERVED_BY, allowed)
    for part in filter(None, value.casefold().split(";")):
        collective, colon, entries = part.rpartition(":")
        words = set(filter(None, entries.removeprefix("^").split(",")))
        chosen = allowed - words if entries.startswith("^") else words
        enabled |= {collective: chosen} if colon else dict.fromkeys(_SERVED_BY, chosen)
    lost = [name for name in COLLECTIVES if not enabled[name.casefold()] & _SERVED_BY[name.casefold()]]
    if not lost:
        return None
    problem = f"leaves no algorithm for {' and '.join(filter(None, (', '.join(lost[:-1]), lost[-1])))}"
    return ValueFault(problem, "a list that includes Ring, which supports every collective", mild=True)


def _choice(value: str, allowed: set[str], words: tuple[str, ...], release: str | None) -> ValueFault | None:
    expected = f"a list of {', '.join(words)} (to exclude them, begin the list with ^)"
    strict = release is None or within(release, first=STRICT_LISTS)
    if not strict and (";" in value or ":" in value):
        return ValueFault(f"has one list per collective, which NCCL supports since {STRICT_LISTS}", expected)
    effect = "NCCL rejects it" if strict else "NCCL ignores it"
    collectives = {word.casefold() for word in COLLECTIVES}
    for position, part in enumerate(filter(None, value.split(";"))):
        collective, colon, entries = part.rpartition(":")
        if not colon and position:
            return ValueFault("has a second part that names no collective: NCCL rejects it", expected)
        if colon and collective.casefold() not in collectives:
            return ValueFault(
                f"names the collective {_quoted([collective])}: {effect}",
                f"lists for {', '.join(COLLECTIVES)}",
            )
        unknown = [word for word in entries.removeprefix("^").split(",") if word and word.casefold() not in allowed]
        if unknown:
            what = "is not a valid value" if unknown == [value] else f"contains {_quoted(unknown)}"
            return ValueFault(f"{what}: {effect}", expected)
    return None


def _cta_policy(info: VariableInfo, name: str, value: str, release: str | None) -> ValueFault | None:
    if value[:1] in ("0", "1", "2"):
        return None
    if value[:1].isdigit():
        return ValueFault("is out of range", "0, 1, 2, or DEFAULT, EFFICIENCY, ZERO joined with |")
    if release is not None and within(release, before="2.29"):
        return ValueFault("is a word, which NCCL supports since 2.29: this release reads it as 0", "0, 1 or 2")
    unknown = [word for word in value.split("|") if word and word.upper() not in ("DEFAULT", "EFFICIENCY", "ZERO")]
    if not unknown:
        return None
    return ValueFault(f"contains {_quoted(unknown)}, which NCCL ignores", "DEFAULT, EFFICIENCY, ZERO joined with |")


def _subnet(info: VariableInfo, name: str, value: str, release: str | None) -> ValueFault | None:
    try:
        ipaddress.ip_network(value, strict=False)
    except ValueError:
        return ValueFault("is not a subnet: NCCL ignores it", "a subnet such as 10.0.0.0/16")
    return None if "/" in value else ValueFault("has no prefix length: NCCL ignores it", "a subnet such as 10.0.0.0/16")


def _torch_number(info: VariableInfo, name: str, value: str, release: str | None) -> ValueFault | None:
    match = re.match(r"\s*([+-]?\d+)", value)  # std::stoi ignores what follows the digits
    if not match:
        return ValueFault("is not a number: PyTorch rejects it", _range(info))
    return ValueFault("is out of range", _range(info)) if _is_outside(info, int(match.group(1))) else None


def _quoted(words: list[str]) -> str:
    return ", ".join(f"'{word}'" for word in words)


_RULES: dict[str, Callable[[VariableInfo, str, str, str | None], ValueFault | None]] = {
    **dict.fromkeys(("none", "exact-word", "path-level", "protocols", "network-policy", "address"), _simple),
    **dict.fromkeys(("torch-flag", "torch-word"), _simple),
    "number": _number,
    "flag": _flag,
    "wide-flag": _wide_flag,
    "word": _word,
    "words": _words,
    "algorithms": _algorithms,
    "cta-policy": _cta_policy,
    "subnet": _subnet,
    "torch-number": _torch_number,
}
