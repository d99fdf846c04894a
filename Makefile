# The only commands one needs to know. Everything installs into .venv beside this file.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
CONFIG ?= injection_rules/ktransformers.yaml

.PHONY: chat test test-slow lint format docs bench clean

chat: $(READY)  ## install, fetch the default model, open the chat in long-context mode
	$(BIN)/python local_chat.py --mode long_context --config $(CONFIG) $(ARGS)

test: $(READY)  ## the whole suite
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(READY)  ## the checks that take minutes, on the default model
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## docs/configuration.md, from the settings' dataclasses
	$(BIN)/python -m hetero_kv.configuration_docs docs/configuration.md

bench: $(READY)  ## speed, each as a ratio against a peer in the same run
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,plots,eval]'
	touch $@
