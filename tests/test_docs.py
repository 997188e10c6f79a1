"""Every block of code in README and docs runs."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("recipes/*/*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list:
    return [
        pytest.param(
            code,
            id=f"{page.parent.name}/{page.name}:{page.read_text()[: m.start()].count(chr(10)) + 1}",
        )
        for page in PAGES
        for m in BLOCK.finditer(page.read_text())
        for name, code in [m.groups()]
        if name == language
    ]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    exec(compile(code, "block", "exec"), {"__name__": "block"})


@pytest.mark.parametrize("code", blocks("yaml"))
def test_yaml_blocks_parse(code: str):
    assert isinstance(yaml.safe_load(code), dict)


@pytest.mark.parametrize("code", blocks("bash"))
def test_commands_name_what_exists(code: str):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in code.splitlines():
        for target in re.findall(r"^make ([\w-]+)", line):
            assert target in targets
        for config in re.findall(r"--config (\S+)", line):
            assert (ROOT / config).is_file(), config


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
