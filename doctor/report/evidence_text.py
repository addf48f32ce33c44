"""Evidence of findings as lines of text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from doctor.core.text import byte_size, lazy_compile, ranges

K = TypeVar("K")
V = TypeVar("V")

_MOST_ITEMS = 12
_BYTES = lazy_compile(r"(?:^|_)bytes(?:_a_(?P<per>[a-z]+)|_now|_left|_of_one)?(?:_by_\w+)?$")
"""Names of counts of bytes: ``free_bytes``, ``bytes_a_batch``, ``memory_bytes_by_rank``."""
_UNIT = lazy_compile(
    r"(?:^|_)(?P<unit>seconds|milliseconds|microseconds|percent|celsius|mhz|milliwatts)(?:_by_\w+)?$|^(?P<time>seconds)_"
)
"""Names of values with another unit: ``step_seconds``, ``utilization_percent``, ``seconds_waited``."""
_SYMBOLS = {"milliseconds": " ms", "microseconds": " µs", "percent": "%", "celsius": " °C", "mhz": " MHz"}
_DURATIONS = ("age", "limit", "offset", "timeout")
"""Names of durations, whose labels need no word for it."""
_BY = lazy_compile(r"(?:^|_)by_(?P<what>(?:local_)?rank|gpu|process)$")
"""Names of mappings whose keys are numbers of ranks, GPUs or processes."""
_COUNTED = {"absent": "number of missing ranks", "ranks": "number of ranks", "sizes": "number of different sizes"}
"""Labels of names whose value is a number and not a list."""
_STEP_TIMES = ("step_seconds",)
"""Times within a step, in milliseconds as in summaries."""
_PCI_ADDRESS = lazy_compile(r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-9a-fA-F])?")
_IDENTIFIER = lazy_compile("[a-z][a-z0-9_]*")
_NAME = lazy_compile("[A-Za-z][A-Za-z0-9_]*")
_VERSION = lazy_compile(r"\d+(?:\.\w+)+|not installed")
"""Values that need no colon after the name of what has them: ``PyTorch 2.7.1, CUDA 12.6``."""
_VARIABLE = lazy_compile("[A-Z][A-Z0-9]*_[A-Z0-9_]*|RANK")
_KEYS = {"rank": "rank", "local_rank": "local rank", "gpu": "GPU", "process": "process"}
_KEYS_ARE_RANKS = {
    *("calls", "first_indices", "first_on_others", "others_were_in", "seeds", "timed_out_at", "without_gradient"),
}
_ARE_RANKS = {
    *("called_by", "consequences", "continuing", "ended", "missing", "still_finite", "waiting"),
}
_CAUSES_IN_SUMMARY = {"demand", "fragmented", "limit", "others", "size", "skew", "unknown"}
"""Values of ``cause`` of an allocation that failed (doctor/analysis/logs/oom_message.py), which summaries describe."""
_FOR_PROGRAMS = {
    "busy_with",
    "column",
    "component",
    "end_column",
    "end_line",
    "fixable",
    "flow",
    "here_ranks",
    "lost",
    "mixed",
    "preview",
    "seconds_left",
}
_OF_THE_FINDING = ("bytes", "here", "own")
"""Keys for the value of the finding's ranks, next to one of the other ranks."""
_SHARE = lazy_compile(
    r"^(?:usual_)?(?:processor|throttled)_share$|^share(?:_of_places|_drawn_twice)?$|^contents_alike$"
)
"""Names of shares between 0 and 1, shown in percent."""
_ARE_INDICES = {"gpus", "inactive_links"}
_NAMED_RANKS = {"called_by", "ranks_with", "ranks_without"}
_PARAMETERS = {
    "machine_rank",
    "num_machines",
    "num_nodes",
    "num_processes",
    "train_batch_size",
    "use_distributed_sampler",
}
"""Names of parameters of other programs, shown as they are written there."""
_VALUES_ARE_RANKS = {"checksums", "directories", "initial", "ranks_by_value", "releases", "values"}
_CAPITALS = {
    word.lower(): word
    for word in (
        *("CPU", "CUDA", "GID", "GPU", "ID", "IMEX", "IOMMU", "IP", "MIG", "MTU", "NCCL", "NUMA", "NVML", "PCI", "PID"),
        *("RDMA", "SXid", "Xid"),
    )
}
_CAPITALS |= {f"{word}s": f"{capitals}s" for word, capitals in _CAPITALS.items()}
_LABELS = {
    "along_with": "in common",
    "also": "also in",
    "aborted_by_gloo": "ranks aborted by Gloo",
    "architectures": "architectures of PyTorch",
    "asked": "requested",
    "asked_for": "requested",
    "awaited": "missing rank",
    "aggregate_uncorrected": "aggregate uncorrectable errors",
    "batch_at_the_end": "batch when memory runs out",
    "batch_could_be_times": "batch size factor that fits",
    "broadcast": "parameters broadcast",
    "bytes_a_batch": "growth",
    "bytes_a_second": "growth",
    "bytes": "size",
    "bytes_left": "remaining",
    "bytes_now": "in use",
    "batches_differ": "shapes differ only in the first dimension",
    "came": "joined",
    "claims": "processes",
    "closed": "without a device file",
    "consequences": "ranks that failed as a consequence",
    "continuing": "ranks that continue",
    "contents": "hashes of the first batches",
    "contents_alike": "identical tensors in the first batches",
    "cuda_of_driver": "CUDA supported by the driver",
    "cpu_quota": "CPU quota (CPUs)",
    "device_bytes": "GPU memory",
    "device_peak_bytes": "estimated peak",
    "dma_buf": "DMA-BUF supported",
    "elsewhere": "other ranks",
    "elsewhere_resolved": "resolved on other ranks",
    "elsewhere_told": "configured on other ranks",
    "filesystem": "file system",
    "fingerprint": "dataset fingerprint",
    "exclude": "hosts to exclude",
    "ended": "ranks that ended",
    "count": "received count",
    "first": "first rank to fail",
    "first_on_others": "first batch on the other ranks",
    "first_trouble": "first error",
    "failed": "failed connections",
    "family": "address family",
    "forward_compatibility": "CUDA compat package",
    "full_size_lost": "full-size packets lost",
    "floor_bytes": "required for any batch size",
    "foreshadows": "may cause",
    "goes_along_with": "in common",
    "goes_with": "in common",
    "from": "set in",
    "held_by_others_bytes": "held by other processes",
    "hashes": "hashes of the models",
    "hosts_with_it_active": "hosts where it is active",
    "hosts_that_share": "hosts that share the directory",
    "holds_most": "largest allocations",
    "limit_microseconds": "limit",
    "link_gbit_per_s": "slowest link (Gb/s)",
    "loader_at_line": "DataLoader at line",
    "initial": "initial checksum",
    "inner": "inner sampler",
    "job_started_at_line": "ranks start at line",
    "keys": "store keys",
    "largest_batch_units": "largest batch (samples or tokens)",
    "interval_bytes": "expected range",
    "left_over_nccl_bytes": "size of leftover NCCL files",
    "left_over_nccl_files": "leftover NCCL files",
    "microseconds": "latency",
    "may_mean": "possible cause",
    "instead": "available instead",
    "last_seen": "last step seen",
    "meant": "intended value",
    "missing": "missing ranks",
    "met_by_rank": "largest batch was on rank",
    "near": "similar name",
    "not_seen": "reads of other hosts' files",
    "need_bytes": "required",
    "needed": "required",
    "number": "collective number",
    "non_finite_losses": "consecutive non-finite losses at the end",
    "only_on_gpus": "applies only to",
    "only_on_several_hosts": "applies only to multi-host jobs",
    "origins": "set in",
    "others": "other copies",
    "nvswitches": "NVSwitches",
    "ntasks": "--ntasks",
    "ntasks_per_node": "--ntasks-per-node",
    "num_replicas": "num_replicas of the sampler",
    "others_were_in": "other ranks were in",
    "peers_gbit_per_s": "peers (Gb/s)",
    "rate_gbit_per_s": "rate (Gb/s)",
    "speed_mbit_per_s": "speed (Mb/s)",
    "part": "compared parameters",
    "pcie_link_carries": "PCIe bandwidth",
    "pcie_link_now": "PCIe link",
    "places": "call sites",
    "processor_share": "CPU share",
    "ranks_with": "found on",
    "ranks_without": "not found on",
    "processes_each": "processes per launcher",
    "ranks_claimed_twice": "number of ranks used twice",
    "outside_bytes": "used by other processes",
    "ram_available_bytes": "available RAM",
    "ram_total_bytes": "total RAM",
    "ranks_bytes": "held by ranks",
    "read_by_cuda": "GPU indices visible to CUDA",
    "repeated": "repeated samples",
    "reserved_unallocated_bytes": "reserved but unallocated",
    "ranks_that_came": "ranks that joined",
    "ranks_with_detail": "ranks with DETAIL",
    "release": "version",
    "peers_median": "median of the others",
    "peers_median_bytes": "median of the others",
    "releases": "versions",
    "removed": "removed in",
    "room": "remaining",
    "room_bytes": "free",
    "said_by_rank": "errors by rank",
    "segment_bytes": "segment size",
    "share": "share of repeated samples",
    "share_drawn_twice": "samples drawn by several ranks",
    "share_of_places": "identical indices at the same position",
    "seconds": "duration",
    "seconds_since_boot": "logged after boot",
    "seconds_a_step_by_rank": "time in this phase per step",
    "settings_that_differ": "settings",
    "sharing_asked_for": "sharing requested",
    "siblings": "groups compared",
    "sockets_asked": "sockets requested",
    "sockets_most": "sockets allowed",
    "still_finite": "ranks with finite values",
    "timeout_ms": "timeout (ms)",
    "times": "matching log lines",
    "table": "GID table",
    "told": "configured",
    "tried": "connections tried",
    "turns": "repetitions",
    "usual_seconds": "usual duration",
    "verbs_library": "libibverbs installed",
    "units_seen": "largest batch so far",
    "units_to_come": "largest batch on any rank",
    "waiting": "waiting ranks",
    "wanted": "requested",
    "wheels": "installed wheels",
    "workers": "DataLoader workers",
    "workers_bytes": "held by workers",
    "wanted_by": "required by",
    "wanted_bytes": "requested",
    "what": "tensor",
    "absent": "missing",
    "active_links_of_best_peer": "active links of the best-connected GPU",
    "clock_max_mhz": "maximum clock",
    "clock_reasons": "throttle reasons",
    "generation_max": "maximum generation",
    "lines": "matching kernel log lines",
    "domains": "NVLink domain and clique",
    "memory_total_bytes": "GPU memory",
    "torch": "PyTorch",
    "visible": "visible GPUs",
    "named_by": "configured by",
    "outside_the_allocators_bytes": "memory outside PyTorch's allocator",
    "nvml": "error",
    "offset_seconds": "clock offset",
    "pci": "PCI address",
    "pci_bus_id": "PCI address",
    "kept_bytes": "memory between steps",
    "kept_bytes_of_one": "memory of one rank between steps",
    "peak_bytes_of_one": "peak memory of one rank",
    "peaks_bytes": "peak memory of the ranks",
    "pci_gpus": "GPUs on the PCI bus",
    "driver_gpus": "GPUs reported by the driver",
    "processors_allowed_by_rank": "allowed CPUs by rank",
    "remapped_rows_uncorrectable": "rows remapped after uncorrectable errors",
    "source": "set in",
    "spread_seconds": "largest clock difference",
    "sram_uncorrected": "uncorrectable SRAM errors",
    "trait": "property",
    "usual_processor_share": "usual CPU share",
    "volatile_uncorrected": "volatile uncorrectable errors",
    "watched_seconds": "observation time",
    "width_lanes": "lanes",
    "width_max_lanes": "maximum lanes",
    "asserted": "failed assertion",
    "axis": "mesh dimension",
    "compared_with_ranks": "number of compared ranks",
    "imex_running": "IMEX daemon running",
    "pinned_to": "allowed CPUs",
    "processes_on_it": "PIDs on the GPU",
    "quota_cpus": "CPU quota",
    "ranks_on_it": "number of ranks on the GPU",
    "readings": "number of readings",
    "throttled_share": "share of throttled periods",
    "wrapped_at_line": "model wrapped at line",
    "written": "in the checkpoint",
}
"""Labels of evidence whose names, which programs read, are not terms of the field."""


def evidence_lines(evidence: Mapping[str, object], ranks: Sequence[int] = ()) -> list[str]:
    """Return a line ``name: value`` for each value that is known and not empty.

    ``where`` takes a line per rank, ``said`` its own lines. A variable without a value is ``not set``. Positions in
    source files are for programs. ``ranks``: those of the finding, unless ``here_ranks`` names the ranks that have the
    values of ``here``."""
    here = _ranks(evidence.get("here_ranks") or ranks) if ranks else "these ranks"
    lines: list[str] = []
    before = ""
    for name, value in evidence.items():
        compared, before = before, name
        if name in _FOR_PROGRAMS or (name == "cause" and str(value) in _CAUSES_IN_SUMMARY):
            continue
        if name == "where" and isinstance(value, Mapping):
            lines += _by_place(value)
        elif name == "said" and isinstance(value, (list, tuple)):
            lines += map(str, value)
        elif name.isupper() or not _is_absent(value):
            label = _label_of(name, value, here, compared)
            if name == "held_by_others_bytes" and "memory_bytes_by_process" not in evidence:
                label += " (estimated)"  # what is neither free nor of this process
            lines.append(f"{label}: {_value(name, value, here)}")
    return lines


def _label_of(name: str, value: object, here: str, compared: str) -> str:
    """The label; ``compared``: the evidence before it, whose value on other ranks ``elsewhere`` is."""
    if name in _OF_THE_FINDING and isinstance(value, Mapping):
        return here
    if name == "elsewhere" and not isinstance(value, Mapping) and compared:
        return f"{_label(compared)} on other ranks"
    return _label_for(name, value)


def _label_for(name: str, value: object) -> str:
    """The label, in the singular for a list of one rank, which would else read as a number of ranks."""
    if isinstance(value, int) and name in _COUNTED:
        return _COUNTED[name]
    if name in ("device", "devices") and (kind := _kind_of_device(value)):
        return kind
    if name == "source" and str(value).startswith(("http://", "https://")):
        return name
    label = _label(name) if name not in _ARE_RANKS or _are_integers_in(value) else name.replace("_", " ")
    if not _is_one_integer(value):
        return label
    label = label.removesuffix("s") if label.endswith("GPUs") else label
    one = re.sub(r"^ranks(?= |$)|\branks$", "rank", label)
    return one.replace("rank that continue", "rank that continues")


def _kind_of_device(value: object) -> str:
    """``GPU`` for a UUID, ``PCI address`` for an address on the bus; else empty."""
    texts = [str(one) for one in value] if isinstance(value, (list, tuple)) else [str(value)]
    if texts and all(map(_PCI_ADDRESS.fullmatch, texts)):
        return "PCI address" if len(texts) == 1 else "PCI addresses"
    return ("GPU" if len(texts) == 1 else "GPUs") if texts and all(one.startswith("GPU-") for one in texts) else ""


def _are_integers_in(value: object) -> bool:
    return not isinstance(value, str) and not (isinstance(value, (list, tuple)) and not _are_integers(value))


def _is_one_integer(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 1 and _are_integers(value)


def _is_absent(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(inner is None and not str(key).isupper() for key, inner in value.items())
    return value is None or value in ("", (), [])


def _label(name: str) -> str:
    if name in _LABELS or name in _PARAMETERS or not _IDENTIFIER.fullmatch(name):
        return _LABELS.get(name, name)
    without_unit = re.sub("_bytes(?=$|_)", "", _without_unit(name))
    words = re.sub("_a_(second|step|batch)", r"_per_\1", without_unit).split("_")
    return " ".join(_CAPITALS.get(word, word) for word in words)


def _without_unit(name: str) -> str:
    """``step_seconds`` -> ``step_time``, ``timeout_seconds`` -> ``timeout``, ``busy_percent`` -> ``busy``."""
    unit = _UNIT.search(name)
    if unit is None:
        return name
    before, word, after = name.partition("seconds")
    if word and not before.endswith(("milli", "micro")):
        return before.rstrip("_") + after if before.rstrip("_").endswith(_DURATIONS) else f"{before}time{after}"
    return re.sub(f"_?{unit['unit']}", "", name, count=1) or "time"


def _value(name: str, value: object, here: str = "these ranks") -> str:
    if value is None:
        return "not set" if name.isupper() else "unknown"
    if value == "" and name.isupper():
        return "empty"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return _number(name, value)
    if isinstance(value, Mapping):
        return _mapping(name, value, here)
    if isinstance(value, (list, tuple)):
        return _sequence(name, value)
    if name == "part" and str(value).isdecimal():
        return f"part {value} of the tensors"
    return str(value)


def _number(name: str, value: float) -> str:
    if name in _STEP_TIMES and value < 1:
        return f"{1000 * value:.3g} ms"
    if _SHARE.search(name):
        return f"{100 * value:.3g}%"
    unit = _BYTES.search(name)
    if unit is not None:
        return byte_size(value) + (f" per {unit['per']}" if unit["per"] else "")
    if (other := _UNIT.search(name)) is not None:
        return _with_symbol(value, other["unit"] or other["time"])
    return _plain_number(value)


def _with_symbol(value: float, unit: str) -> str:
    """A value with its unit; hours and days where seconds would have to be converted."""
    if unit == "milliwatts":
        return f"{_plain_number(value / 1000)} W"
    if unit != "seconds":
        return f"{_plain_number(value)}{_SYMBOLS[unit]}"
    for symbol, size in (("days", 86_400), ("h", 3600)):
        if value >= 2 * size:
            return f"{value / size:.3g} {symbol}"
    return f"{_plain_number(value)} s"


def _plain_number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _sequence(name: str, values: Sequence[object]) -> str:
    if _are_integers(values) and name in _ARE_INDICES:
        return ranges(item for item in values if isinstance(item, int))
    if _are_integers(values) and ("rank" in name or name in _ARE_RANKS):
        named = _ranks(values)
        return named if name in _NAMED_RANKS else named.partition(" ")[2]
    if any(isinstance(value, (Mapping, list, tuple)) for value in values):
        return "; ".join(_value(name, value) for value in values) or "none"
    texts = [_value(name, value) for value in values]
    if len(texts) == 2 and name.endswith("_range"):
        return "-".join(texts)
    more = f" and {len(texts) - _MOST_ITEMS} more" if len(texts) > _MOST_ITEMS else ""
    return _separator(texts).join(texts[:_MOST_ITEMS]) + more or "none"


def _mapping(name: str, values: Mapping[object, object], here: str = "these ranks") -> str:
    if _is_range(values):
        return _range_of(name, values)
    if {"memory_of", "bytes_a_second", "bytes_now", "watched_seconds"} <= values.keys():
        return _growth(values)
    if {"own", "excess", "others_wait"} <= values.keys():
        own, excess = (_value("step_seconds", values[name]) for name in ("own", "excess"))
        return f"{own}, {excess} more than its peers"
    if name in _VALUES_ARE_RANKS and all(isinstance(ranks, (list, tuple)) for ranks in values.values()):
        return ", ".join(f"{key} ({_ranks(ranks)})" for key, ranks in values.items())
    if name.startswith("ranks_by_") and all(isinstance(count, int) for count in values.values()):
        return ", ".join(f"{key} ({count} {'rank' if count == 1 else 'ranks'})" for key, count in values.items())
    if name == "said_by_rank" and all(str(rank).isdecimal() for rank in values):
        return _by_message(values)
    if name.endswith("_by_link"):
        return _by_link(values)
    known = {str(key): value for key, value in values.items() if value is not None or str(key).isupper()}
    words = _NAME if all(_VERSION.fullmatch(str(value)) for value in known.values()) else _IDENTIFIER
    plain = all(map(words.fullmatch, known)) and not known.keys() & {*_OF_THE_FINDING, "elsewhere"}
    if _BY.search(name) and len(known) > 1 and all(isinstance(value, Mapping) for value in known.values()):
        return _by_equal_value(name, known)
    pairs = [_pair(name, key, value, plain, here) for key, value in known.items()]
    return _separator(pairs).join(pairs)


def _keys_by_value(values: Mapping[K, V]) -> dict[V, list[K]]:
    """The keys with each value, in their order."""
    keys: dict[V, list[K]] = {}
    for key, value in values.items():
        keys.setdefault(value, []).append(key)
    return keys


def _by_equal_value(name: str, values: Mapping[str, object]) -> str:
    """Ranks with equal values together: ``ranks 0-3 (growth 2 MiB per batch, limit 79 GiB)``."""
    keys = _keys_by_value({key: _value(name, value) for key, value in values.items()})
    what = _KEYS[found["what"]] if (found := _BY.search(name)) is not None else "rank"
    return "; ".join(f"{_numbered(what, same)} ({text})" for text, same in keys.items())


def _numbered(what: str, keys: Sequence[str]) -> str:
    """``rank 3``, ``ranks 0-3``; other keys as they are."""
    if not all(map(str.isdecimal, keys)):
        return ", ".join(keys)
    plural = "es" if what.endswith("s") else "s"
    return f"{what}{plural if len(keys) > 1 else ''} {ranges(map(int, keys))}"


_VERBS = {"waits": "wait", "is": "are", "was": "were"}
_VERB = lazy_compile(r"(?:^|(?<=; ))(waits|is|was)(?= (?:in|at|for)\b)")


def _by_place(values: Mapping[object, object]) -> list[str]:
    """A line for each place, with all ranks that are there: ``ranks 0-1: stalled; wait in all_reduce``."""
    ranks = _keys_by_value({int(str(rank)): str(place) for rank, place in values.items()})
    return [
        f"{_ranks(same)}: {place if len(same) == 1 else _VERB.sub(lambda found: _VERBS[found[1]], place)}"
        for place, same in ranks.items()
    ]


def _by_message(values: Mapping[object, object]) -> str:
    """Ranks with the same message together: ``ranks 0-1: timed out; rank 2: refused``."""
    ranks = _keys_by_value({int(str(rank)): str(message) for rank, message in values.items()})
    return "; ".join(f"{_ranks(same)}: {message}" for message, same in ranks.items())


def _by_link(values: Mapping[object, object]) -> str:
    """Links with equal values together: ``2 on links 0-17``."""
    links = _keys_by_value({int(str(link)): value for link, value in values.items()})
    return ", ".join(f"{value} on link{'' if len(same) == 1 else 's'} {ranges(same)}" for value, same in links.items())


def _separator(texts: Sequence[str]) -> str:
    return "; " if any("," in text for text in texts) or all(text.startswith("rank") for text in texts) else ", "


def _growth(values: Mapping[object, object]) -> str:
    """``DataLoader workers of rank 0: 150 MiB per minute over 1785 s, 6.39 GiB in use``."""
    of = "" if values["memory_of"] == "rank" else f"{values['memory_of']} of "
    rate, now = _value("bytes_a_minute", _a_minute(values["bytes_a_second"])), _value("bytes_now", values["bytes_now"])
    return (
        f"{of}rank {values['rank']}: {rate} over {_value('watched_seconds', values['watched_seconds'])}, {now} in use"
    )


def _a_minute(rate: object) -> object:
    """A rate per second, or the ends of its range, per minute, as in summaries."""
    if isinstance(rate, Mapping):
        return {key: _a_minute(value) for key, value in rate.items()}
    return 60 * rate if isinstance(rate, (int, float)) else rate


def _pair(name: str, key: str, value: object, plain: bool, here: str) -> str:
    """A key and its value; the value has the unit of the mapping, unless its key has one. ``plain``: no key needs a
    colon. ``here``: the ranks of the finding."""
    if _VARIABLE.fullmatch(key):
        text = _value(key, value)
        if name == "origins" or ": " in text:
            return f"{text} ({key})" if name == "origins" else f"{key} ({text})"
        return f"{key} {text}" if text == "not set" else f"{key}={text}"
    is_plain = bool(_IDENTIFIER.fullmatch(key))
    text = _value(key if is_plain and (_has_unit(key) or not _has_unit(name)) else name, value)
    by = _BY.search(name)
    what = _KEYS[by["what"]] if by is not None else "rank" if name in _KEYS_ARE_RANKS else ""
    label = f"{what} {key}" if what and key.isdecimal() else here if key in _OF_THE_FINDING else _label(key)
    if isinstance(value, Mapping) and not _is_range(value):
        return f"{label} ({text})"
    is_list = isinstance(value, (list, tuple)) and key not in _ARE_INDICES
    return f"{label}: {text}" if not plain or is_list else f"{label} {text}"


def _has_unit(name: str) -> bool:
    return bool(_BYTES.search(name) or _UNIT.search(name) or _SHARE.search(name))


def _is_range(values: Mapping[object, object]) -> bool:
    return {"low", "high"} < values.keys() and bool({"expected", "median"} & values.keys())


def _range_of(name: str, values: Mapping[object, object]) -> str:
    low, high = values["low"], values["high"]
    text = _value(name, values.get("expected", values.get("median")))
    return text if low == high else f"{text} ({_value(name, low)} to {_value(name, high)})"


def _are_integers(values: Sequence[object]) -> bool:
    return bool(values) and all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _ranks(values: object) -> str:
    numbers = [value for value in values if isinstance(value, int)] if isinstance(values, (list, tuple)) else []
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {ranges(numbers).replace(',', ', ')}"
