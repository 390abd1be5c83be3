"""The documents keep step with the code and with each other: versions, README's two languages, its command lines."""

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from longread.cli import main as cli
from longread.cli.plan import find_spec
from longread.cli.version import version
from longread.server.metrics import PREFIX, ServerMetrics
from longread.spec.engine import EngineInfo, EngineStats

ROOT = Path(__file__).parents[3]
READMES = ("README.md", "README.zh-CN.md")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code_blocks(text: str) -> list[tuple[str, str]]:
    """(language, body) of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)


def commands(text: str) -> list[str]:
    """Every ``longread ...`` of the blocks without a language: typed lines, and those that a comment suggests."""
    plain = "\n".join(body for language, body in code_blocks(text) if not language)
    return [
        line.partition("#")[0].strip() for line in re.findall(r"(?:^|(?<=\s)|(?<=：))longread .*$", plain, re.M)
    ] + [line.strip() for line in re.findall(r"#.*?(longread [^#]*)$", plain, re.M)]


def without_prose(language: str, body: str) -> str:
    """A block without what is translated: comments, and texts meant for a reader."""
    if language != "python":
        return "\n".join(line.partition("#")[0].rstrip() for line in body.splitlines())
    tree = ast.parse(body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not re.fullmatch(r"\S*", node.value):
            node.value = "prose"
    return ast.dump(tree)


def test_the_version_is_the_newest_entry_of_the_changelog() -> None:
    declared = tomllib.loads(text_of("pyproject.toml"))["project"]["version"]
    newest = re.search(r"^## (\S+)", text_of("CHANGELOG.md"), re.M)
    assert newest is not None and newest.group(1) == declared
    assert version() in (declared, "unknown"), "installed from another pyproject.toml: install again"


def test_the_two_readmes_have_the_same_shape() -> None:
    ours, theirs = (text_of(name) for name in READMES)
    for what, pattern in (
        ("headings", r"^#+(?= )"),
        ("table rows", r"^\|(?=.)"),
        ("links", r"\]\((?!README)[^)#]+\)"),
        ("lines of code", r"^```\w*$"),
    ):
        assert re.findall(pattern, ours, re.M) == re.findall(pattern, theirs, re.M), what


def test_the_two_readmes_have_the_same_code() -> None:
    ours, theirs = ([without_prose(*block) for block in code_blocks(text_of(name))] for name in READMES)
    assert ours and ours == theirs


@pytest.mark.parametrize("name", READMES)
def test_the_command_lines_of_the_readme_are_accepted(name: str) -> None:
    lines = commands(text_of(name))
    assert {line.split()[1] for line in lines} >= {"fixture", "plan", "serve"} and len(lines) >= 4, lines
    for line in lines:
        args = cli.build_parser().parse_args(shlex.split(line)[1:])
        assert args.command == line.split()[1]
    # Names of models are looked up too: a release that plan does not know would only fail when it runs.
    named = [line.split()[2] for line in lines if line.split()[1] == "plan" and "/" not in line]
    assert named and all(find_spec(model) for model in named)


def test_links_between_documents_lead_somewhere() -> None:
    for name in (*READMES, "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md", "LOG.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", text_of(name)):
            assert (ROOT / target).exists(), f"{name} links to {target}"


def test_design_names_every_metric() -> None:
    info = EngineInfo("m", 4096, 4096, 4, 512, 1536, 1, 256, 16, 2, 1)
    metrics = ServerMetrics("m", lambda: (info, EngineStats()))
    exposed = {
        family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(metrics.render().decode())
        if not family.name.endswith("_created")
    }
    told = text_of("DESIGN.md").partition("**`/metrics`**")[2].partition("## Where")[0]
    assert set(re.findall(r"`([a-z_0-9]+)`", told)) == exposed
