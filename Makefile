# Every target sets itself up from Python >= 3.11, a C++ compiler and make.
#   PYTHON   the interpreter that makes .venv        ARGS   more options for the command of the target
#   CXX      the C++ compiler that Inductor uses     JOBS   pytest workers        LIMIT   seconds for test-slow
#   TORCH    the version that test-torch runs on     TORCH_INDEX   where pip finds it, beside its own index,
#                                                    which it takes alone where it cannot reach this one

PYTHON ?= python3
JOBS ?= 2
ARGS ?=
TORCH ?= 2.11.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet -c constraints.txt

# A venv of its own for each other torch, with all other pins as they are; one is for the newest release.
other := .venv-torch-$(TORCH)
newest := .venv-torch-$(shell sed -n 's/^torch==//p' requirements-newest.txt)
other-pip = .venv-torch-$*/bin/python -m pip --disable-pip-version-check install --quiet -c .venv-torch-$*/constraints.txt

# And three with the packages of others that batches are handed to. torchvision is built for one build of torch: both are
# those of TORCH_INDEX where it has them, else of PyPI (with TORCH_INDEX= all are of PyPI). torchrl 0.14 asks for an
# earlier tensordict than the one that is pinned.
clients := .venv-clients
vision := .venv-vision
rl := .venv-rl
pins-rl := s/^tensordict==.*/tensordict==0.14.3/
index-vision := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# What builds the package. Editable installs take it from the venv, since none is made for the build.
builders := hatchling editables hatch-fancy-pypi-readme

# Which extras each kind of target needs; a stamp for each, so that `make demo` installs no test tools.
extras-demo := viz
extras-dev := arrow,dask,dev,io,viz
extras-bench := bench,viz
extras-docs := docs
extras-dist := release
extras-clients := dev,einops,hf,jaxtyping,trainers
extras-vision := dev,vision
extras-rl := dev,rl

# Inductor takes $CXX, else the platform's default name; when only the other one is there, say so to it.
ifneq ($(filter environment command% file override,$(origin CXX)),)
compiler := $(shell command -v $(firstword $(CXX)) 2>/dev/null)
else
CXX := $(shell [ "$$(uname)" = Darwin ] && set -- clang++ g++ || set -- g++ clang++; \
	for c; do command -v $$c >/dev/null 2>&1 && echo $$c && break; done)
compiler := $(CXX)
endif
export CXX

# Each worker has a core to itself: more threads, or Inductor's own compile processes, would only fight over it.
test-env := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
# Whose tests are done takes over some of another worker: the last ones are long.
pytest := $(test-env) $(PY) -m pytest -n $(JOBS) --dist worksteal
fast := not slow and not sweep and not architecture

# Ends pytest as Ctrl-C does: it says what passed and failed until then.
within := $(if $(LIMIT),timeout --foreground --signal=INT --kill-after=60 $(LIMIT))

require = $(if $(strip $(1)),$(error tdc: $(strip $(1))))
# torch 2.13 does not quote its include paths, and torch is installed below this folder.
space := the path of this checkout has a space, with which Inductor cannot compile: move it to one without
no-compiler := no C++ compiler found: install g++ (Debian, Ubuntu: apt install g++; macOS: xcode-select --install) or set CXX
no-python = no Python runs as '$(PYTHON)': install Python 3.11 or newer, or name one, as in make PYTHON=python3.12
python-problem = $(shell "$(PYTHON)" .ci/preflight.py 2>/dev/null || echo "$(no-python)")

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-slow test-torch smoke test-clients test-vision test-rl sweep mutants soak bench lint types docs dist \
	clean compiler
.DELETE_ON_ERROR:

help: ## list the targets
	@echo "make <target> [ARGS=...] [PYTHON=python3] [CXX=g++] [JOBS=2]"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' Makefile | while IFS='|' read -r name text; do printf '  %-12s %s\n' $$name "$$text"; done

demo: compiler .venv/.ready-demo ## train a small model end to end and write demo_report/ (python -m tdc demo)
	$(PY) -m tdc demo $(ARGS)

test: compiler .venv/.ready-dev ## the fast tests, on JOBS workers: after every edit
	$(pytest) --durations=10 -m "$(fast)" $(ARGS)

test-all: compiler .venv/.ready-dev ## every test, by the hour: before a release
	$(pytest) $(ARGS)

test-slow: compiler .venv/.ready-dev ## what else must pass to land; LIMIT=600 ends it after so many seconds
	$(test-env) $(within) $(PY) -m pytest -n $(JOBS) --dist worksteal -m "slow and not sweep and not architecture" $(ARGS)

test-torch: compiler $(other)/.ready ## the fast tests on TORCH=2.11.0, the oldest that works, in .venv-torch-2.11.0
	$(test-env) $(other)/bin/python -m pytest -n $(JOBS) --dist worksteal -m "$(fast)" $(ARGS)

smoke: compiler $(newest)/.ready ## the tests of .ci/smoke.txt on the newest torch, that of requirements-newest.txt
	$(test-env) $(newest)/bin/python -m pytest -n $(JOBS) --dist worksteal @.ci/smoke.txt $(ARGS)

test-clients: compiler $(clients)/.ready ## the tests with transformers, lightning and others, in .venv-clients
	$(test-env) $(clients)/bin/python -m pytest -n $(JOBS) tests/clients tests/docs -m "clients and not sweep" $(ARGS)

test-vision: compiler $(vision)/.ready ## the tests with torchvision and timm, in .venv-vision
	$(test-env) $(vision)/bin/python -m pytest -n $(JOBS) tests/clients/test_vision.py tests/docs -m "clients and not sweep" $(ARGS)

test-rl: compiler $(rl)/.ready ## the tests with torchrl, in .venv-rl
	$(test-env) $(rl)/bin/python -m pytest -n $(JOBS) tests/clients/test_torchrl.py tests/docs -m "clients and not sweep" $(ARGS)

sweep: compiler .venv/.ready-dev ## torch's own samples of every operation as batches: the counts of docs/torch_samples.md (ARGS="--limit 3" for few)
	$(test-env) $(PY) tests/opinfo/sweep.py --all --jobs $(JOBS) $(ARGS)

bench: compiler .venv/.ready-bench ## every benchmark in bench/, one after the other
	@set -e; for file in bench/[!_]*.py; do \
		[ -e "$$file" ] || { echo "bench/ has no benchmarks"; exit 1; }; \
		name=$$(basename "$$file" .py); echo "== bench.$$name"; $(PY) -m "bench.$$name" $(ARGS); done

mutants: .venv/.ready-dev ## small faults in the rules that tests must find, ARGS="--count 50 --seed 0"
	$(test-env) $(PY) tests/mutants.py $(ARGS)

soak: .venv/.ready-dev ## stores under attack: mutated manifests, killed writers, readers beside writers (docs/storage.md)
	$(test-env) $(PY) tests/io/soak.py $(ARGS)

lint: .venv/.ready-dev ## ruff, and the tests that read the code: rooms, sizes, names
	$(PY) -m ruff check .
	$(test-env) $(PY) -m pytest tests/architecture $(ARGS)

types: .venv/.ready-dev ## pyright
	$(PY) -m pyright $(ARGS)
	$(PY) -m pyright -p .ci/pyright-strict.json

docs: .venv/.ready-docs ## the site of docs/, in build/site: warnings are errors
	$(PY) -m sphinx --fail-on-warning --keep-going --quiet -b html docs build/site $(ARGS)

dist: .venv/.ready-dev .venv/.ready-dist ## the package in dist/, built twice, and tried in an empty environment; ARGS=--quick: in a minute
	$(PY) .ci/dist.py $(ARGS)

clean: ## remove caches and outputs; .venv stays (delete it for a new set-up)
	rm -rf build dist demo_report .pytest_cache .ruff_cache .hypothesis *.egg-info *.pt2
	find . -name __pycache__ -not -path "./.venv*/*" -prune -exec rm -rf {} +

compiler:
	$(call require,$(if $(compiler),,$(no-compiler)))
	$(call require,$(if $(word 2,$(CURDIR)),$(space)))
	@:

# The venv is made once; a stamp is renewed when the requirements or the pins change.
.venv/bin/python:
	$(call require,$(python-problem))
	@echo "making .venv"
	@"$(PYTHON)" -m venv --clear .venv || { rm -rf .venv; exit 1; }
	@faster=$$("$(PYTHON)" .ci/fastest.py "$(PYTHON)"); [ -z "$$faster" ] || \
		echo "$$faster runs the tests faster: rm -r .venv, and make PYTHON=$$faster"

# Made once, too: other requirements or pins are installed into it, in seconds where torch is there.
.venv-torch-%/.ready: pyproject.toml constraints.txt
	$(call require,$(python-problem))
	@echo "installing the pinned packages with torch $* (the first time takes minutes: torch is large)"
	@[ -x .venv-torch-$*/bin/python ] || "$(PYTHON)" -m venv --clear .venv-torch-$* || { rm -rf .venv-torch-$*; exit 1; }
	@sed 's/^torch==.*/torch==$*/' constraints.txt > .venv-torch-$*/constraints.txt
	@$(other-pip) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@$(other-pip) $(builders)
	@$(other-pip) --no-build-isolation -e ".[$(extras-dev)]"
	@touch $@

$(clients)/.ready $(vision)/.ready $(rl)/.ready: .venv-%/.ready: pyproject.toml constraints.txt
	$(call require,$(python-problem))
	@echo "making .venv-$* (torch is large: this takes minutes)"
	@"$(PYTHON)" -m venv --clear .venv-$* || { rm -rf .venv-$*; exit 1; }
	@sed '$(pins-$*)' constraints.txt > .venv-$*/constraints.txt
	@.venv-$*/bin/python -m pip --disable-pip-version-check install --quiet -c .venv-$*/constraints.txt $(builders)
	@.venv-$*/bin/python -m pip --disable-pip-version-check install --quiet -c .venv-$*/constraints.txt $(index-$*) --no-build-isolation -e ".[$(extras-$*)]"
	@touch $@

.venv/.ready-%: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing the pinned packages for $* (the first time takes minutes: torch is large)"
	@$(PIP) $(builders)
	@$(PIP) --no-build-isolation -e ".[$(extras-$*)]"
	@touch $@
