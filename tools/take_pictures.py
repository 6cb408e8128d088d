#!/usr/bin/env python3
"""Takes the README's picture, docs/images/explorer.png, from the first notebook as it runs here.

Needs Playwright and a browser (Chromium, Chrome or Edge; LABKIT_BROWSER may name one).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import notebook_browser as browser  # beside this file

from labkit.doctor import find_browser

TARGET = browser.ROOT / "docs" / "images" / "explorer.png"
LARGEST = 300_000  # bytes


def main() -> int:
    path = find_browser()
    if path is None:
        print("no Chromium, Chrome or Edge found: install one, or name it in LABKIT_BROWSER")
        return 1
    from playwright.sync_api import sync_playwright

    with (tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright,
          browser.jupyter(Path(folder), "light") as address):
        chromium = playwright.chromium.launch(executable_path=path, args=browser.FLAGS)
        page = chromium.new_page(viewport={"width": 1440, "height": 1000})
        page.goto(address, timeout=90_000)
        browser.run_all_cells(page)
        told = browser.errors(page)
        if told:
            print(f"a cell failed: {told[0]}")
            return 1
        browser.show_explorer(page)
        picture = page.screenshot()
        chromium.close()
    if len(picture) > LARGEST:
        print(f"the picture has {len(picture):,} bytes, more than {LARGEST:,}: it is not saved")
        return 1
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_bytes(picture)
    print(TARGET.relative_to(browser.ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
