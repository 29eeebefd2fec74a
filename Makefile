# Everything a fresh machine needs: Python 3.11+, pip, make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test lint clean

$(VENV)/installed: setup.cfg pyproject.toml $(wildcard tfdist/*.py tfdist/*/*.py strategies/*.py callbacks/*.py)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	rm -rf build
	$(BIN)/python -m pip install --quiet ".[test]"
	touch $@

demo: $(VENV)/installed
	$(BIN)/tfdist run -n 2 examples/digits_two_workers.py --out demo-output

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: lint
	$(BIN)/pytest -q -n 2 --dist loadfile

clean:
	rm -rf $(VENV) build dist *.egg-info demo-output
