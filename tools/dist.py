"""Build wheel and sdist, and try the wheel outside the checkout.

    python tools/dist.py

Both are built into ``dist``, and their metadata and content are checked. The wheel is installed
into a fresh environment, and the examples of the README run there, in another folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
NEEDED = ("LICENSE", "README.md", "CITATION.cff", "SECURITY.md", "CHANGELOG.md", "pyproject.toml")


def build() -> tuple[Path, Path]:
    """Build both and return the paths of wheel and sdist."""
    shutil.rmtree(DIST, ignore_errors=True)
    # The wheel is built from the sdist, so a file that the sdist lacks is missing in both.
    subprocess.run([sys.executable, "-m", "build", "--outdir", DIST, ROOT], check=True)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return wheel, sdist


def check_wheel(wheel: Path) -> str:
    """Check content and metadata of a wheel, and return its version."""
    package = ROOT / "src" / "factormix"
    wanted = {
        str(Path("factormix") / path.relative_to(package))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        there = set(archive.namelist())
        (raw,) = (archive.read(name) for name in there if name.endswith(".dist-info/METADATA"))
    missing = sorted(wanted - there)
    if missing:
        raise SystemExit(f"{wheel.name} lacks {', '.join(missing)}")
    metadata = Metadata.from_email(raw, validate=True)
    for field in ("summary", "license_expression", "description", "requires_python", "keywords"):
        if not getattr(metadata, field):
            raise SystemExit(f"the metadata of {wheel.name} lacks {field}")
    return str(metadata.version)


def check_sdist(sdist: Path) -> None:
    """Check that an sdist has the files that users and packagers need."""
    with tarfile.open(sdist) as archive:
        there = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in NEEDED if name not in there]
    if missing or not any(name.startswith("tests/") for name in there):
        raise SystemExit(f"{sdist.name} lacks {', '.join(missing) or 'the tests'}")


def try_wheel(wheel: Path) -> None:
    """Install a wheel into a fresh environment and run the README's examples there."""
    outside = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        pip = [python, "-m", "pip", "-q", "install", "-c", ROOT / "constraints.txt"]
        subprocess.run([*pip, f"{wheel}[explore,data,plots]"], check=True, env=outside, cwd=folder)
        for file in (ROOT / "README.md", ROOT / "tools" / "examples.py"):
            shutil.copy(file, folder)
        where = "import factormix, pathlib; print(pathlib.Path(factormix.__file__).resolve())"
        found = subprocess.run(
            [python, "-c", where], check=True, env=outside, cwd=folder, capture_output=True
        )
        if not found.stdout.decode().startswith(str(folder.resolve())):
            raise SystemExit(f"another factormix was found: {found.stdout.decode().strip()}")
        subprocess.run(
            [python, "examples.py", "README.md", "--all"], check=True, env=outside, cwd=folder
        )


def main() -> None:
    wheel, sdist = build()
    version = check_wheel(wheel)
    check_sdist(sdist)
    try_wheel(wheel)
    print(f"{wheel.name} and {sdist.name} of version {version} are in {DIST.name}")


if __name__ == "__main__":
    main()
