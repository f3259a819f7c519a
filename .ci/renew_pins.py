"""Write constraints.txt: the versions that this environment has, and what Python 3.10 gets instead where it must.

    .venv/bin/python -m pip install --upgrade ...   # what should be newer; then make test; then
    .venv/bin/python .ci/renew_pins.py              # needs the resolver `uv` on the path (pip install uv)

The resolver looks at Linux, macOS and Windows and at Python 3.10 to 3.13 at once; it is told to keep what is
installed here wherever that version exists.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLATFORMS = (("linux", "x86_64"), ("darwin", "arm64"), ("win32", "AMD64"))
NEVER = re.compile(r"nvidia-|cuda-|triton$|setuptools$|pip$|wheel$|labkit$")
"""What torch's own builds pin among themselves, and what venv brings."""


def installed() -> dict[str, str]:
    return {canonical(dist.name): dist.version.split("+")[0] for dist in metadata.distributions()}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve(folder: Path) -> str:
    """uv's universal resolution of every extra, as requirement lines with markers."""
    keep = [f"{name}=={version} ; python_full_version >= '3.11.5'" for name, version in installed().items()]
    constraints = folder / "installed.txt"
    constraints.write_text("\n".join(line for line in keep if not NEVER.match(line.split("=")[0])) + "\n")
    environments = ", ".join(
        f"\"sys_platform == '{system}' and platform_machine == '{machine}' and implementation_name == 'cpython'"
        " and python_full_version < '3.14'\""
        for system, machine in PLATFORMS
    )
    project = folder / "pyproject.toml"
    project.write_text((ROOT / "pyproject.toml").read_text() + f"\n[tool.uv]\nenvironments = [{environments}]\n")
    uv = shutil.which("uv") or sys.exit("uv is not on the path: pip install uv")
    command = [uv, "pip", "compile", "--universal", "--python-version", "3.10", "--extra", "dev", "--no-header"]
    options = ["--no-annotate", "--python", sys.executable, "-c", str(constraints), str(project)]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else sys.exit(done.stderr)


def simplify(resolution: str) -> list[str]:
    """Only Python matters in our markers: {name: version}, or two versions and where the one gives way to the other."""
    versions: dict[str, dict[str, str]] = {}
    for line in filter(None, resolution.splitlines()):
        pin, _, marker = line.partition(";")
        name, version = pin.strip().split("==")
        if not NEVER.match(name):
            versions.setdefault(name, {})[version] = marker
    lines = []
    for name, found in sorted(versions.items()):
        if len(found) == 1:
            lines.append(f"{name}=={next(iter(found))}")
            continue
        (old, marker), (new, _) = sorted(found.items(), key=lambda item: "python_full_version >=" in item[1])
        (border,) = re.findall(r"python_full_version < '(3\.11[.\d]*)'", marker)
        python = "python_version" if border == "3.11" else "python_full_version"
        lines += [f"{name}=={new} ; {python} >= '{border}'", f"{name}=={old} ; {python} < '{border}'"]
    return lines


def main() -> None:
    path = ROOT / "constraints.txt"
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    with tempfile.TemporaryDirectory() as folder:
        pins = simplify(resolve(Path(folder)))
    path.write_text("\n".join([*head, *pins]) + "\n")
    print(f"{len(pins)} pins written to {path}")


if __name__ == "__main__":
    main()
