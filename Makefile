# The only commands one needs to know. Everything installs into .venv beside this file.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
TESTED := $(VENV)/.installed-for-tests
CLUSTER := $(VENV)/.installed-for-clusters
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
CONFIG ?= injection_rules/adaptive.yaml
# Processes that run tests side by side, a core and 2 GB each; 0 runs them in one.
WORKERS ?= 2
# How many times the tries of `make test-slow` a campaign makes.
TIMES  ?= 100

# For the newest versions of everything, with PYTHON.
NEWEST := .venv-newest/$(notdir $(PYTHON))

.PHONY: chat serve cluster test test-newest test-cuda test-slow test-page test-agents test-schema test-llama test-cluster test-s3 campaign mutations lint format docs bench bench-report gpu-check gpu-bench clean

chat: $(READY)  ## install, fetch the default model, open the chat in long-context mode
	$(BIN)/python local_chat.py --mode long_context --config $(CONFIG) $(ARGS)

serve: $(READY)  ## install, fetch the default model, answer programs that speak OpenAI's or Anthropic's API
	$(BIN)/hetero-kv serve --config $(CONFIG) $(ARGS)

cluster: $(CLUSTER)  ## two replicas on this machine with a small model, and questions about two documents
	$(BIN)/python docs/examples/ask_cluster.py $(ARGS)

# In the order of their names, for those that compile most kernels come early, and the last ones take moments. Modules
# are compiled once for all processes that tests start.
test: export PYTHONDONTWRITEBYTECODE =
test: $(TESTED)  ## the whole suite
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-newest:  ## the suite on the newest versions of everything, whatever the bounds; PYTHON=python3.13 on another Python
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python tests/support/unbounded_requirements.py > $(NEWEST)/requirements.txt
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -r $(NEWEST)/requirements.txt
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	$(NEWEST)/bin/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-cuda: $(TESTED)  ## what of the suite runs on a GPU, or on a simulated one where there is none
	$(BIN)/python -m pytest -m "cuda and not slow" -n $(WORKERS) --dist loadfile $(ARGS)

test-slow: $(TESTED)  ## the checks that take minutes, on the default model, and every variant of the suite's
	$(BIN)/python -m pytest -m slow $(ARGS)

test-page: $(TESTED)  ## the server's page in a browser: Debian's chromium, or Chrome
	$(PIP) playwright
	$(BIN)/python -m pytest -m slow tests/server/page $(ARGS)

# In environments of their own, whose packages would change those of the others.
test-agents: $(TESTED)  ## a coding agent edits a file by the server and the default model, LangChain asks; minutes
	$(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python -m pip install --quiet --disable-pip-version-check mini-swe-agent langchain-openai
	MINI_SWE_AGENT=$(CURDIR)/.venv-agents/bin/mini LANGCHAIN_PYTHON=$(CURDIR)/.venv-agents/bin/python \
		$(BIN)/python -m pytest -m slow tests/server/test_agents.py tests/server/test_langchain.py $(ARGS)

test-schema: $(TESTED)  ## random requests by the server's OpenAPI document; SECONDS=300
	$(PYTHON) -m venv .venv-schema
	.venv-schema/bin/python -m pip install --quiet --disable-pip-version-check schemathesis
	SCHEMATHESIS=$(CURDIR)/.venv-schema/bin/st $(BIN)/python -m pytest -m slow tests/server/test_schema.py $(ARGS)

test-llama: $(TESTED)  ## greedy tokens beside llama.cpp's, of real models and of every architecture; builds it, minutes
	$(PYTHON) -m venv .venv-llama
	.venv-llama/bin/python -m pip install --quiet --disable-pip-version-check --no-binary llama-cpp-python llama-cpp-python
	LLAMA_PYTHON=$(CURDIR)/.venv-llama/bin/python $(BIN)/python -m pytest -m slow tests/gguf/test_llama_cpp.py $(ARGS)

test-cluster: $(CLUSTER)  ## replicas on Ray Serve that answer, are killed, hang, and lose their folder; minutes
	$(BIN)/python -m pytest tests/server/cluster $(ARGS)

test-s3: $(TESTED)  ## contexts at an S3 address, of a server on this machine
	$(PYTHON) -m venv .venv-s3
	.venv-s3/bin/python -m pip install --quiet --disable-pip-version-check 'moto[s3,server]' s3fs
	PYTHONPATH=$$(echo $(CURDIR)/.venv-s3/lib/python3*/site-packages) MOTO_SERVER=$(CURDIR)/.venv-s3/bin/moto_server \
		$(BIN)/python -m pytest -m slow tests/serving/test_s3_contexts.py $(ARGS)

campaign: $(TESTED)  ## damaged files and interrupted writes, a hundred times the slow tests' tries; hours
	$(BIN)/python -m tests.campaigns --times $(TIMES) $(ARGS)

mutations: $(TESTED)  ## deliberate mistakes, each of which a test must see; some minutes
	$(BIN)/python -m tests.mutations $(ARGS)

lint: $(TESTED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/commit_subjects.py

format: $(TESTED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## docs/configuration.md, from the settings' dataclasses
	$(BIN)/python -m hetero_kv.commands.configuration_docs docs/configuration.md

bench: $(READY)  ## speed, each as a ratio against a peer in the same run
	$(BIN)/python -m benchmarks $(ARGS)

bench-report: $(READY)  ## the tables of the documents, from benchmarks/results/, and the plots of these tables
	$(BIN)/python -m benchmarks.report
	$(BIN)/python -m benchmarks.results_plots docs/results.md
	$(BIN)/python -m benchmarks.peers --recorded --plot docs/peers.png
	$(BIN)/python -m benchmarks.cluster_simulation --recorded docs/cluster_simulation.png

gpu-check: $(READY)  ## whether everything computes and fits on this machine's GPU; a few minutes, no network
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

gpu-bench: $(READY)  ## the same checks, then how fast this machine's GPU is; under eight minutes, no network
	$(BIN)/python -m benchmarks.gpu $(ARGS)

clean:
	rm -rf $(VENV) .venv-* build *.egg-info

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[documents,plots,eval,server]'
	touch $@

# Apart, so that nobody who wants to chat waits for a compiler of GPU kernels.
$(TESTED): $(READY)
	$(PIP) -e '.[test,documents,plots,eval,server]'
	touch $@

# Apart, for Ray has a hundred megabytes that one machine's server does not need.
$(CLUSTER): $(TESTED)
	$(PIP) -e '.[test,documents,plots,eval,server,cluster]'
	touch $@
