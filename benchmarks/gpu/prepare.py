"""Fill .gpu with everything that the checks need on a machine with one GPU and no network.

``make gpu-prepare`` runs this, with a network; it needs no GPU. The folder and the repository's
files then go to the machine together.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import flashmoa

ROOT = Path(__file__).resolve().parents[2]
# The wheel has kernels for many GPUs. The kit takes only Hopper's.
KERNELS, ARCHITECTURE = "sglang-kernel==0.4.2.post2", "sm90"
PYTHON = ("--python-version", "3.12", "--implementation", "cp")
_GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)
# The checks need only the models' shapes. Their weights are dummies.
MODELS = {"qwen3-8b": "Qwen--Qwen3-8B", "qwen3-30b-a3b": "Qwen--Qwen3-30B-A3B"}
# SGLang finds the plugin by its package's metadata. The code comes from the repository.
PROJECTS = (".", "server_patches")


def download(folder: Path, *what: str) -> None:
    """Download wheels for Python 3.12 on x86-64 Linux. Raises: SystemExit if one is missing."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC] + ["manylinux2014_x86_64"]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--only-binary=:all:", *PYTHON, "--dest", str(folder),
        *(part for abi in ("cp312", "abi3", "none") for part in ("--abi", abi)),
        *(part for platform in platforms for part in ("--platform", platform)),
        *what,
    ]  # fmt: skip
    if subprocess.run(command).returncode:
        raise SystemExit(f"gpu-prepare: pip found no wheels for {' '.join(what)}")


def take_kernels(site: Path) -> None:
    """Unpack the wheel of kernels into a folder, with one architecture's kernels."""
    with tempfile.TemporaryDirectory() as folder:
        download(Path(folder), KERNELS)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site, [name for name in archive.namelist() if is_needed(name)])


def is_needed(name: str) -> bool:
    is_code = name.startswith("sgl_kernel/") and name.endswith(".py")
    return is_code or f"/{ARCHITECTURE}/" in name or ".dist-info/" in name


def write_metadata(site: Path) -> None:
    """Write the metadata of our packages as if they were installed: versions, entry points."""
    for place in PROJECTS:
        project = tomllib.loads((ROOT / place / "pyproject.toml").read_text())["project"]
        name, version = project["name"], flashmoa.__version__
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        groups: dict[str, dict[str, str]] = project.get("entry-points", {})
        lines = [
            line
            for group, points in groups.items()
            for line in (f"[{group}]", *(f"{point} = {value}" for point, value in points.items()))
        ]
        (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


def write_models(folder: Path) -> None:
    """Copy the models' configurations from aiconfigurator-core."""
    shapes: Any = files("aiconfigurator_core") / "model_configs"
    for name, source in MODELS.items():
        config = json.loads((shapes / f"{source}_config.json").read_text())
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))


def take_libraries(folder: Path) -> None:
    """Copy libnuma: the kernels need it, and a bare machine may lack it."""
    folder.mkdir(parents=True, exist_ok=True)
    name = ctypes.util.find_library("numa")
    found = [path for path in Path("/usr/lib").rglob(name or "libnuma.so.1") if path.exists()]
    if found:
        shutil.copy(found[0].resolve(), folder / "libnuma.so.1")
    else:
        print("gpu-prepare: there is no libnuma here: check that the machine with the GPU has it")


def size_of(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def check_sizes(folder: Path, tracked: list[Path], limit: int) -> str:
    """Return a line with both sizes in bytes. Raises: SystemExit if their sum exceeds ``limit``."""
    carried, own = size_of(list(folder.rglob("*"))), size_of(tracked)
    text = (
        f"{folder}: {carried:,} bytes; the repository's files: {own:,} bytes; together "
        f"{carried + own:,} of {limit:,}"
    )
    if carried + own > limit:
        raise SystemExit(f"gpu-prepare: too large. {text}. Leave packages out, or give --limit.")
    return text


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--limit", type=int, default=64 * 2**20, help="bytes, with the repository's files"
    )
    options = parser.parse_args()
    out = ROOT / ".gpu"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    print("[1/3] wheels")
    download(out / "wheels", "--requirement", str(ROOT / "benchmarks" / "gpu" / "requirements.txt"))
    print(f"[2/3] kernels for {ARCHITECTURE} (300 MB to download)")
    take_kernels(out / "site")
    print("[3/3] models' shapes, and times of the modelled GPUs")
    write_metadata(out / "site")
    write_models(out / "models")
    take_libraries(out / "lib")
    times = [sys.executable, "-m", "flashmoa_bench.gpu.forwards", str(out / "expected.json")]
    subprocess.run(times, check=True)
    print(check_sizes(out, tracked_files(), options.limit))


if __name__ == "__main__":
    main()
