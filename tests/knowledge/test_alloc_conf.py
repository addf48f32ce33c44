"""The grammar of PYTORCH_ALLOC_CONF, also against the parser of the torch that is installed."""

from __future__ import annotations

import pytest

from doctor.knowledge.alloc_conf import alloc_conf_faults, nearest_option, split_options
from tests.lab.cases import each_case

SOUND = [
    "",
    "max_split_size_mb:128",
    "max_split_size_mb:20",
    "max_split_size_mb:-1",
    "max_split_size_mb:128,",
    " expandable_segments : True ",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[256:0,>:1]",
    "garbage_collection_threshold:0.8",
    "backend:native",
    "pinned_use_background_threads:True",
    "max_split_size_mb:64,expandable_segments:False",
]
BROKEN = [
    "max_split_size_mb:19",
    "max_split_size_mb:12x",
    "max_split_size_mb:x",
    "max_split_size_mb:",
    "max_split_size_mb",
    "max_split_size_mb=128",
    "expandable_segments:true",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:[256:1,512:3]",
    "roundup_power2_divisions:[300:1]",
    "roundup_power2_divisions:[256:1",
    "garbage_collection_threshold:1.0",
    "garbage_collection_threshold:0",
    "pinned_use_background_threads:1",
    "max_non_split_rounding_mb:10",
    "max_split_size_mb:128;expandable_segments:True",
    "large_segment_size_mb:32,max_split_size_mb:24",
]
"""Values that torch takes, and that it raises at."""


@each_case("text", SOUND)
def test_sound(text: str) -> None:
    assert list(alloc_conf_faults(text, "2.13.0")) == []


@each_case("text", BROKEN)
def test_broken(text: str) -> None:
    assert list(alloc_conf_faults(text, "2.13.0"))


@pytest.mark.parametrize("text", [*SOUND, *BROKEN])
def test_torch_says_the_same(text: str) -> None:
    torch = pytest.importorskip("torch")
    if torch.__version__.split(".")[:2] < ["2", "13"] or not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        pytest.skip("this torch has another grammar")
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")  # the settings of the case before persist
    try:
        torch._C._accelerator_setAllocatorSettings(text)
        refused = False
    except (RuntimeError, ValueError):
        refused = True
    assert refused == (text in BROKEN)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("max_split_size", "max_split_size_mb"),
        ("expandable_segment", "expandable_segments"),
        ("garbage_collection_treshold", "garbage_collection_threshold"),
        ("colour", None),
    ],
)
def test_unknown_option(key: str, near: str | None) -> None:
    (found,) = alloc_conf_faults(f"{key}:True", "2.8.0")
    assert "unknown option" in found.text
    assert nearest_option(key) == near


def test_options_by_release() -> None:
    assert list(alloc_conf_faults("expandable_segments:True", "2.0.1"))
    assert not list(alloc_conf_faults("expandable_segments:True", "2.1.0"))
    assert list(alloc_conf_faults("throw_on_cudamalloc_oom:True", "2.8.0"))
    assert not list(alloc_conf_faults("throw_on_cudamalloc_oom:True"))
    assert not list(alloc_conf_faults("brand_new_option:1", "2.99.0"))


def test_the_other_backend() -> None:
    assert not list(alloc_conf_faults("backend:cudaMallocAsync", "2.8.0"))
    (ignored,) = alloc_conf_faults("backend:cudaMallocAsync,max_split_size_mb:64", "2.8.0")
    assert ignored.harmless
    (clash,) = alloc_conf_faults("backend:cudaMallocAsync,expandable_segments:True", "2.8.0")
    assert clash.harmless
    assert list(alloc_conf_faults("backend:cudamallocasync", "2.8.0"))


def test_an_equals_sign_is_explained() -> None:
    (found,) = alloc_conf_faults("max_split_size_mb=128", "2.8.0")
    assert "colon" in found.text
    assert found.fix == "max_split_size_mb:128"


def test_lists_stay_together() -> None:
    options, broken = split_options("roundup_power2_divisions:[256:1, >:8],backend:native")
    assert broken is None
    assert dict(options) == {"roundup_power2_divisions": "[256:1,>:8]", "backend": "native"}
