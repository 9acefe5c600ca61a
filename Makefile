# Everything here works on a fresh clone: the first target that needs it makes .venv, once.
#   make demo    watch a real script go wrong, and a healthy one go through
#   make test    the whole suite, slow tests and frameworks included
#   make faults  every toy fault and look-alike with three seeds
#   make check   lint, types and the fast tests, under 90 seconds: before each commit
#   make bench   the benchmarks behind the numbers in the documentation
#   make outward every plugin from its wheel, with the packages that it needs, in an environment of its own: minutes, needs an index
#   make docs    write the generated pages again
#   make golden  write the golden files again: published packs, the schema of rule files, messages about bad rule files, what a console shows

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FRAMEWORKS := $(VENV)/.frameworks
# Two workers: CI has two cores, and more of them only wait for each other inside torch.
WORKERS ?= 2

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
# The tests start hundreds of processes: without bytecode each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test faults check lint fast bench docs golden wheels outward clean
.DEFAULT_GOAL := check

# torch first and alone: whatever comes later finds it there and does not choose another one.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=23" "setuptools>=77" wheel
	$(BIN)/python -m pip install --quiet torch==2.13.0 -c constraints.txt
	$(BIN)/python -m pip install --quiet -e ".[dev]" -c constraints.txt
	touch $@

$(FRAMEWORKS): $(READY)
	$(BIN)/python -m pip install --quiet transformers accelerate lightning pytorch-lightning trl tensorboard -c constraints.txt
	touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(FRAMEWORKS)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --durations=15 tests plugins

# Every toy fault and look-alike with three seeds: ten minutes and more.
faults: $(READY)
	HEALTHCHECK_TEST_SEEDS=0,1,2 $(BIN)/python -m pytest -n $(WORKERS) -q tests/faults/test_faults.py

check: lint fast

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fast: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -q -m "not slow"

bench: $(READY)
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

docs: $(READY)
	$(BIN)/python docs/_generate.py
	$(BIN)/python docs/_update.py

# Read the diff: what is written here is promised to users.
golden: $(READY)
	HEALTHCHECK_UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q tests/rules/test_published_packs.py tests/rulefile tests/unit/rulelang/test_schema.py tests/console

wheels: $(READY)
	rm -rf dist build plugins/*/build  # a build folder hands its old files on
	for source in . plugins/healthcheck-*; do $(BIN)/python -m build --quiet --wheel --no-isolation --outdir dist $$source || exit 1; done
	rm -rf build plugins/*/build plugins/*/*.egg-info  # copies of files that tests and searches would find

# With a Prometheus server on PATH (Debian's package) its test runs too, else it says that it was skipped.
outward: wheels
	$(BIN)/python plugins/outward.py dist

clean:
	rm -rf build dist *.egg-info plugins/*/build plugins/*/*.egg-info .pytest_cache .mypy_cache .ruff_cache
