"""The layout of the package: what is shipped, what imports what, what importing costs."""

import ast
import configparser
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "tfdist": ROOT / "tfdist",
    "tfdist.compression": ROOT / "tfdist" / "compression",
    "tfdist.callbacks": ROOT / "callbacks",
    "tfdist.strategies": ROOT / "strategies",
}


def modules(package):
    return sorted(FOLDERS[package].glob("*.py"))


def imported_by(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_package_folder_is_listed():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = config["options"]["packages"].split()
    mapped = dict(line.split(" = ") for line in config["options"]["package_dir"].split("\n")[1:])
    folders = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for path in ROOT.glob("*/**/__init__.py")
        if not {".venv", "build"} & set(path.relative_to(ROOT).parts)
    }
    names = {next((n for n, f in mapped.items() if f == folder), folder) for folder in folders}
    assert names == set(listed)


@pytest.mark.parametrize("name", ["cluster", "launch"])
def test_no_tensorflow_in_the_launcher_and_the_cluster(name):
    code = f"import sys, tfdist.{name}; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent).returncode == 0


@pytest.mark.parametrize(
    "path", modules("tfdist") + modules("tfdist.compression"), ids=lambda p: p.stem
)
def test_core_does_not_import_strategies_or_keras(path):
    outer = ("tfdist.strategies", "tfdist.callbacks", "keras")
    bad = {n for n in imported_by(path) if n.startswith(outer)}
    # doctor reports the version of Keras, nothing else of it.
    assert bad <= ({"keras"} if path.stem == "launch" else set())


@pytest.mark.parametrize("path", modules("tfdist.strategies"), ids=lambda p: p.stem)
def test_only_one_module_knows_the_inside_of_keras(path):
    inside = {name for name in imported_by(path) if name.startswith("keras.src")}
    assert not inside or path.stem == "_keras"


def test_callbacks_and_strategies_do_not_import_each_other():
    for one, other in (("callbacks", "strategies"), ("strategies", "callbacks")):
        for path in modules(f"tfdist.{one}"):
            assert not {n for n in imported_by(path) if n.startswith(f"tfdist.{other}")}


def test_public_names_resolve():
    tfdist = importlib.import_module("tfdist")
    for name in tfdist.__all__:
        assert getattr(tfdist, name) is not None, name
    with pytest.raises(AttributeError, match="NoSuchStrategy"):
        _ = tfdist.NoSuchStrategy


def test_mapped_folder_refuses_another_name():
    code = "import strategies"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "pip install" in done.stderr


def test_public_objects_have_docstrings():
    tfdist = importlib.import_module("tfdist")
    for package in FOLDERS:
        for path in modules(package):
            stem = "" if path.stem == "__init__" else f".{path.stem}"
            module = importlib.import_module(f"{package}{stem}")
            assert module.__doc__, module
            for name, value in vars(module).items():
                if name.startswith("_") or getattr(value, "__module__", "") != module.__name__:
                    continue
                if callable(value):
                    assert value.__doc__, f"{module.__name__}.{name}"
    assert tfdist.__doc__
