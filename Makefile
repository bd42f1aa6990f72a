# make train                                   train on the embedded data set
# make train DATA=path/to/ml-1m/ratings.dat    train on MovieLens-1M
# make test                                    run the tests
# make test-thorough                           other modes, many models, notebooks: 7 minutes
# make test-examples                           with timm, TRL, Lightning, diffusers: 2 minutes
# make test-clients                           programs written for Opacus alone: 3 minutes
# make fuzz                                    random models in random loops: 2 minutes
# make mutations                               break a third of what can break: 1 minute
# make notebooks                               run the notebooks, store what they print and draw:
#                                              3 minutes; FILES=tutorials/dpformer.ipynb for some
# make docs                                    build the site of docs/ into site/, strictly
# make dist                                    build the wheel and the sdist, and try both
# make test-opacus                             run Opacus's own tests with the package: 2 minutes
# make test-torch TORCH=2.14.1                 make test with another torch (the oldest if none is
#                                              given), in an environment of its own: 5 GB, 4 minutes more;
#                                              also PYTHON=python3.12 TRANSFORMERS=5.17.0
# make gpu                                     measure on a GPU: 8 minutes (goes on when cut off)
# make upstream                                test our patches for Opacus; all of its tests: ARGS=--all
# ARGS=... is passed on: make test ARGS="-k linear", make train ARGS="--help"

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
DATA ?=
FILES ?=

BIN := $(VENV)/bin
# What is never imported is never compiled, which is most of it; what is, once: every
# process of the tests would otherwise compile the package anew.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-thorough test-examples test-clients fuzz mutations notebooks docs dist test-opacus install-torch test-torch upstream benchmark gpu benchmark-moe lint clean

train: $(VENV)/.installed
	$(BIN)/opacus-ext recommend $(if $(DATA),--data "$(DATA)") $(ARGS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)

test-thorough: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal -m "thorough and not slow" $(ARGS)

test-examples: $(VENV)/.installed-examples
	$(VENV)/examples/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal -m "examples and not slow" $(ARGS)

test-clients: $(VENV)/.installed-clients
	$(VENV)/clients/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal -m clients tests/clients $(ARGS)

# Two processes, of even and odd seeds from a new one; failures are kept in runs/.
FUZZ_MINUTES ?= 2
FUZZ_SEED ?= $(shell date +%s)
fuzz: $(VENV)/.installed
	@mkdir -p runs
	$(BIN)/python -m tests.fuzz --minutes $(FUZZ_MINUTES) --seed $(FUZZ_SEED)0 --stride 2 --keep runs/fuzz.jsonl & \
	first=$$!; \
	$(BIN)/python -m tests.fuzz --minutes $(FUZZ_MINUTES) --seed $(FUZZ_SEED)1 --stride 2 --keep runs/fuzz.jsonl; \
	second=$$?; wait $$first && exit $$second

# Every third fault of tests/mutations.txt, another third each day.
MUTATIONS_THIRD ?= $(shell expr $$(date +%j) % 3)
mutations: $(VENV)/.installed
	$(BIN)/python -m tests.mutations --third $(MUTATIONS_THIRD)

notebooks: $(VENV)/.installed-notebooks
	$(VENV)/notebooks/bin/python tools/notebooks.py $(FILES)

# Nothing is imported, so torch need not be there: the code is parsed.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

dist: $(VENV)/.installed-dev
	$(BIN)/python tools/release.py $(ARGS)

# torchvision is for the data of these tests alone; its kernels need not fit torch's build.
test-opacus: $(VENV)/.installed
	$(INSTALL) --no-deps --target $(VENV)/torchvision torchvision
	PYTHONPATH=$(VENV)/torchvision $(BIN)/python -m pytest -n auto --maxprocesses 8 -q -c /dev/null --rootdir . \
	    -p no:cacheprovider -p tests.opacus_suite --pyargs opacus.tests $(ARGS)

# The oldest torch that setup.cfg allows, unless another is given.
TORCH ?= $(shell sed -n 's/^ *torch>=//p' setup.cfg)
TRANSFORMERS ?= $(shell sed -n 's/^transformers==//p' constraints.txt)
OTHER := $(VENV)/$(subst /,_,$(PYTHON))-torch-$(TORCH)-transformers-$(TRANSFORMERS)
install-torch: $(OTHER)/.installed
test-torch: $(OTHER)/.installed
	$(OTHER)/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)

upstream: $(VENV)/.installed
	$(INSTALL) --no-deps --target $(VENV)/torchvision torchvision
	PYTHONPATH=$(abspath $(VENV)/torchvision) $(BIN)/python upstream/run.py $(ARGS)

benchmark: $(VENV)/.installed
	$(BIN)/python -m benchmarks step_time $(ARGS)

gpu: $(VENV)/.installed
	$(BIN)/python -m benchmarks gpu $(ARGS)

benchmark-moe: $(VENV)/.installed
	$(BIN)/python -m benchmarks moe $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/black --check --diff .
	$(BIN)/isort --check .
	$(BIN)/flake8
	$(BIN)/python tools/typed.py
	$(BIN)/python tools/shape.py

clean:
	rm -rf $(VENV) build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: setup.cfg constraints.txt | $(BIN)/python
	$(INSTALL) -e ".[test]"
	@touch $@

# The versions of constraints.txt, but for torch, which comes first, as pip may not have it.
$(OTHER)/.installed: setup.cfg constraints.txt
	$(PYTHON) -m venv --clear $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet --no-compile torch==$(TORCH) || { \
	    echo "pip can't get torch $(TORCH) for $$($(OTHER)/bin/python --version) here. Its versions: pip index versions torch" >&2; \
	    exit 1; }
	sed '/^torch/d; /^transformers==/d' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --no-compile -c $(OTHER)/constraints.txt \
	    -e ".[test]" torch==$(TORCH) transformers==$(TRANSFORMERS)
	@touch $@

# The extras "docs" and "dev" without the package, which would bring torch, or be built
# again.
$(VENV)/.installed-dev: $(VENV)/.installed
$(VENV)/.installed-docs $(VENV)/.installed-dev: $(VENV)/.installed-%: setup.cfg constraints.txt | $(BIN)/python
	$(BIN)/python -c "import configparser; c = configparser.ConfigParser(); c.read('setup.cfg'); \
	    print(c['options.extras_require']['$*'])" > $(VENV)/$*.txt
	$(INSTALL) -r $(VENV)/$*.txt
	@touch $@

# An environment on top of the other: torchvision, which timm asks for, breaks the import
# of transformers where its kernels do not fit torch's build (tests/vision.py).
$(VENV)/.installed-examples: $(VENV)/.installed
	$(PYTHON) -m venv $(VENV)/examples
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	    > $$($(VENV)/examples/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/parent.pth
	$(VENV)/examples/bin/python -m pip install --quiet --no-compile -c constraints.txt -e ".[test,examples]"
	@touch $@

# As above: what runs notebooks, which no test needs.
$(VENV)/.installed-notebooks: $(VENV)/.installed
	$(PYTHON) -m venv $(VENV)/notebooks
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	    > $$($(VENV)/notebooks/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/parent.pth
	$(VENV)/notebooks/bin/python -m pip install --quiet --no-compile -c constraints.txt nbclient ipykernel
	@touch $@

# The programs without what they require: DPTrainer pins Opacus 1.5.4, mostlyai-engine
# torchaudio, Safe-Synthesizer another huggingface-hub, and Flower a server of its own.
CLIENTS := dptrainer flwr mostlyai-engine nemo-safe-synthesizer
$(VENV)/.installed-clients: $(VENV)/.installed
	$(PYTHON) -m venv $(VENV)/clients
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	    > $$($(VENV)/clients/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/parent.pth
	$(VENV)/clients/bin/python -m pip install --quiet --no-compile -c constraints.txt -e ".[test,clients]"
	$(VENV)/clients/bin/python -m pip install --quiet --no-compile --no-deps -c constraints.txt $(CLIENTS)
	@touch $@
