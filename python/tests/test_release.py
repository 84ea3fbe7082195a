"""What pip installs of a release, where releases are published, and which program the demos run. Stand-ins take the
program's place.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import sconce_client

VERSION = sconce_client.__version__
MACHINE = platform.machine()
TARGET = f"{MACHINE}-unknown-linux-gnu"
UNCLEAN = ("PYTHONPATH", "MAKEFLAGS", "MAKEOVERRIDES")
CLEAN = {name: value for name, value in os.environ.items() if name not in UNCLEAN and not name.startswith("GITHUB_")}


def done(command: list[str | Path], **variables: str) -> str:
    """What it prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True, env={**CLEAN, **variables}).stdout


def refused(command: list[str | Path], **variables: str) -> str:
    """The error that it prints."""
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env={**CLEAN, **variables})
    assert ended.returncode == 1, ended
    return ended.stderr


def commit_of(repository: Path) -> str:
    return done(["git", "-C", repository, "rev-parse", "--short=12", "HEAD"]).strip()


def commit_all(repository: Path) -> None:
    git: list[str | Path] = ["git", "-C", repository, "-c", "user.name=a", "-c", "user.email=a@example.org"]
    done([*git, "add", "--all"])
    done([*git, "commit", "--quiet", "--allow-empty", "--message", "a"])


def compiled(folder: Path, *with_library: str | Path) -> Path:
    """A program that says of itself that it is sconce, of this commit."""
    source, program = folder / "main.c", folder / "sconce"
    words = f"sconce {VERSION} (commit {commit_of(ROOT)}, {TARGET}; features: none)"
    call = "later(); " if with_library else ""
    main = f'int main(void) {{ {call}return puts("{words}") < 0; }}'
    source.write_text(f"#include <stdio.h>\nvoid later(void);\n{main}\n")
    done(["cc", "-o", program, source, *with_library])
    return program


def test_pip_installs_the_program_with_the_client_and_removes_both(tmp_path: Path) -> None:
    release = ROOT / "scripts/release"
    dist = tmp_path / "dist"
    done([release, "wheel"], DIST=str(dist))
    done([release, "package", TARGET, compiled(tmp_path)], DIST=str(dist))
    [wheel] = dist.glob("sconce_server-*.whl")
    assert wheel.name.endswith(f"-py3-none-manylinux_2_34_{MACHINE}.whl")
    for made in [*dist.glob("*.whl"), *dist.glob("*.tar.gz")]:
        done(["sh", "-c", 'cd "$1" && sha256sum --check "$2"', "sh", dist, f"{made.name}.sha256"])

    place = tmp_path / "venv"
    done([sys.executable, "-m", "venv", "--without-pip", place])
    empty = {path for path in place.rglob("*") if "__pycache__" not in path.parts}
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--quiet", "--python", place / "bin/python"]
    done([*pip, "install", "--no-index", "--find-links", dist, "sconce-server"])
    assert done([place / "bin/sconce", "--version"]).startswith(f"sconce {VERSION} (commit ")
    shown = done([place / "bin/python", "-c", "import sconce_client; print(sconce_client.__version__)"])
    assert shown == f"{VERSION}\n"
    done([*pip, "uninstall", "--yes", "sconce-server", "sconce-client"])
    assert {path for path in place.rglob("*") if "__pycache__" not in path.parts} == empty


@pytest.mark.parametrize(
    ("library", "version", "error"),
    [
        ("libm.so.6", "GLIBC_2.99", "needs glibc 2.99, not 2.34"),
        ("libfurther.so.1", "FURTHER_1", "needs further libraries: libfurther.so.1"),
    ],
)
def test_a_program_that_needs_more_than_the_wheel_says_is_refused(
    library: str, version: str, error: str, tmp_path: Path
) -> None:
    source, script, made = tmp_path / "later.c", tmp_path / "versions", tmp_path / "liblater.so"
    source.write_text("void later(void) {}\n")
    script.write_text(f"{version} {{ global: later; }};\n")
    flags = [f"-Wl,--version-script={script}", f"-Wl,-soname,{library}"]
    done(["cc", "-shared", "-nostdlib", "-o", made, source, *flags])
    program = compiled(tmp_path, made)
    assert error in refused([ROOT / "scripts/release", "package", TARGET, program], DIST=str(tmp_path / "dist"))
    assert not (tmp_path / "dist").exists()


def test_the_wheel_is_built_around_a_program_alone(tmp_path: Path) -> None:
    pip: list[str | Path] = [sys.executable, "-m", "pip", "wheel", "--no-deps"]
    wheel = [*pip, "--wheel-dir", tmp_path, ROOT / "python/server"]
    assert "`make wheel` builds this wheel" in refused(wheel)


def test_releases_have_one_address(tmp_path: Path) -> None:
    named = ["Cargo.toml", "README.md", "python/README.md", "python/pyproject.toml", "python/server/README.md"]
    locks = ["Cargo.lock", "examples/Cargo.lock", "fuzz/Cargo.lock"]
    for name in [*named, *locks, "Makefile", "scripts/release", "python/src/sconce_client/__init__.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    sections = f"## [Unreleased]\n\n## [{VERSION}] - 2026-01-01\n\n- [Embeds](docs/protocol.md#a) texts.\n"
    (tmp_path / "CHANGELOG.md").write_text(sections)
    done(["git", "init", "--quiet", tmp_path])
    commit_all(tmp_path)
    release, tag = tmp_path / "scripts/release", f"v{VERSION}"

    def set_to(address: str) -> None:
        done(["make", "-C", tmp_path, "address", f"REPOSITORY={address}"])

    set_to("https://github.com/" + "OWNER_NOT_SET/sconce")  # In two parts, which no real `make address` replaces.
    assert "no address of the releases is set" in refused([release, "check", tag])
    set_to("https://github.com/Sea-Side/sconce")
    assert done([release, "check", tag]) == f"sconce {VERSION}\n"
    there = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "Sea-Side/sconce"}
    done([release, "check", tag], **there)
    error = refused([release, "check", tag], **{**there, "GITHUB_REPOSITORY": "fork/sconce"})
    assert "is https://github.com/Sea-Side/sconce, and this is https://github.com/fork/sconce" in error
    for name in named:
        text = (tmp_path / name).read_text()
        assert "https://github.com/Sea-Side/sconce" in text and "OWNER_NOT_SET" not in text, name
    assert done([release, "images", tag, "-cuda"]).splitlines()[0] == f"ghcr.io/sea-side/sconce:{VERSION}-cuda"
    link = f"https://github.com/Sea-Side/sconce/blob/{tag}/docs/protocol.md#a"
    assert done([release, "notes", tag]) == f"- [Embeds]({link}) texts.\n"
    assert '"sconce" is no address' in refused([release, "set_address", "sconce"])


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository in which `make demo` prints which program it would run, and a compiler that says what it is told."""
    place = tmp_path / "checkout"
    for name in ["scripts/installed-program", "Makefile", "Cargo.toml"]:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place / name)
    told = 'echo "cargo $*: $CARGO_TERM_PROGRESS_WHEN $CARGO_TERM_PROGRESS_WIDTH"'
    for name, line in [("examples/demo/run", 'echo "runs $1"'), ("scripts/fetch-model", ":"), ("cargo", told)]:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"#!/bin/sh\n{line}\n")
        (place / name).chmod(0o755)
    done(["git", "init", "--quiet", place])
    commit_all(place)
    return place


def demo(checkout: Path, path: Path | None) -> tuple[list[str], str]:
    """The last lines of `make demo`, and what it says of the program; `path` is searched for programs first."""
    # An installed sconce of the machine is not the test's.
    folders = [one for one in os.environ["PATH"].split(":") if not Path(one, "sconce").exists()]
    environment = {**CLEAN, "PATH": ":".join([str(path)] * (path is not None) + folders)}
    command: list[str | Path] = ["make", "-s", "-C", checkout, "demo", "CARGO=./cargo"]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("cargo ", "runs "))]
    return lines, ended.stderr


BUILT = ["cargo build --release --locked: always 80", "runs target/release/sconce"]


def test_the_demo_compiles_with_progress_in_a_log_too(checkout: Path) -> None:
    lines, said = demo(checkout, None)
    assert lines == BUILT
    assert "installed-program" not in said and "compiling sconce first" in said


def test_the_demo_runs_an_installed_program_of_the_same_commit(checkout: Path, tmp_path: Path) -> None:
    program = tmp_path / "bin/sconce"
    program.parent.mkdir()

    def install(version: str) -> None:
        program.write_text(f"#!/bin/sh\necho '{version}'\n")
        program.chmod(0o755)

    install(f"sconce 0.1.0 (commit {commit_of(checkout)}, {TARGET}; features: http)")
    (checkout / "README.md").write_text("no source of the program")
    lines, said = demo(checkout, program.parent)
    assert lines == [f"runs {program}"] and f"using {program}" in said

    manifest = checkout / "Cargo.toml"
    manifest.write_text(manifest.read_text() + "# another\n")
    lines, said = demo(checkout, program.parent)
    assert lines == BUILT and f"{program} is not used: the sources here are not those of" in said

    before = commit_of(checkout)
    commit_all(checkout)
    lines, said = demo(checkout, program.parent)
    assert lines == BUILT and f"(commit {before}, " in said and f"this is commit {commit_of(checkout)}" in said

    install("a sconce of somebody else")
    lines, said = demo(checkout, program.parent)
    assert lines == BUILT and 'its --version is "a sconce of somebody else"' in said
