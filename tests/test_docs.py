"""The documentation names tests, files and options that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def defined_names():
    """Names of cases and tests: functions, and names that tables give in loops."""
    sources = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    text = "\n".join(sources)
    return set(re.findall(r"\bdef ([a-z_0-9]+)\(", text)) | set(
        re.findall(r"[\"']([a-z][a-z_0-9]+)[\"']", text)
    )


def test_feature_table_names_real_tests():
    named = set()
    for line in (ROOT / "docs" / "features.md").read_text().splitlines():
        if line.startswith("| ") and line.count("|") == 3:
            named |= set(re.findall(r"`([a-z_0-9]+)`", line.split("|")[2]))
    assert len(named) > 100
    assert not named - defined_names()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_anchors_are_headings(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text()):
        headings = re.findall(
            r"^#+ (.+)$", (page.parent / target if target else page).read_text(), re.M
        )
        slugs = {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings}
        assert anchor in slugs, f"{target}#{anchor}"
