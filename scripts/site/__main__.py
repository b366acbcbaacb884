"""`python -m scripts.site`: builds the site in build/site and checks its links. Exit code 1: it cannot be published."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from scripts.site.check import check_site
from scripts.site.pages import ROOT, write_pages


def build(folder: Path, root: Path = ROOT) -> list[str]:
    """Builds the site of the repository in `folder`/site from pages that it writes to `folder`/pages.

    Returns its faults.
    """
    write_pages(root, folder / "pages")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(ROOT / "mkdocs.yml")]
    places = {"SITE_PAGES": str(folder / "pages"), "SITE_FOLDER": str(folder / "site")}
    built = subprocess.run(command, env=os.environ | places, capture_output=True, text=True, check=False)
    if built.returncode:
        return built.stderr.strip().splitlines() or [f"mkdocs: exit code {built.returncode}"]
    return check_site(folder / "site")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.site", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build", help="the site is in its folder site/")
    folder = parser.parse_args().folder.resolve()
    problems = build(folder)
    print("\n".join(problems) or f"site: {folder / 'site' / 'index.html'}", file=sys.stderr if problems else sys.stdout)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
