"""The documentation names tests, files and options that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_feature_table_names_real_tests(case_names):
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    known = case_names | set(re.findall(r"^def (test_[a-z_0-9]+)\(", tests, re.M))
    named = set()
    for line in (ROOT / "docs" / "features.md").read_text().splitlines():
        if line.startswith("| ") and line.count("|") == 3:
            named |= set(re.findall(r"`([a-z_0-9]+)`", line.split("|")[2]))
    assert len(named) > 100
    assert not named - known
    assert not case_names - named, "cases that the table does not name"


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
