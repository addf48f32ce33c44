"""The picture of a report: ``python -m tests.report.picture report.html report.png [light|dark]``. Needs Chromium."""

import sys
from pathlib import Path

from tests.report.browser import Watched, chromium

SIZE = {"width": 1180, "height": 900}


def take(page, path, colours="light"):
    """The upper part of a page: the verdict, the fix, and the timeline."""
    with chromium() as browser:
        watched = Watched(browser, Path(page).resolve(), viewport=SIZE, color_scheme=colours, device_scale_factor=1.5)
        watched.page.add_style_tag(content="#evidence, #others, #lost-time { display: none }")
        end = watched.page.locator("#timeline").bounding_box()
        clip = {"x": 0, "y": 0, "width": SIZE["width"], "height": end["y"] + end["height"] + 8}
        # Not full_page, which scrolls the timeline back to its beginning.
        watched.page.set_viewport_size({"width": SIZE["width"], "height": int(clip["height"]) + 1})
        watched.page.screenshot(path=path, clip=clip)


if __name__ == "__main__":
    take(*sys.argv[1:])
