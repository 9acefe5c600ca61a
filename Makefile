# Everything here works on a fresh clone: the first target that needs it makes .venv, once.
#   make demo    watch a real script go wrong, and a healthy one go through
#   make test    the whole suite, slow tests and frameworks included
#   make floors  the tests of frameworks with the oldest versions that pyproject.toml allows: once a week, and before a floor is moved
#   make zoo     libraries without an adapter, with the real packages
#   make faults  every toy fault and look-alike with three seeds
#   make check   lint, types and the fast tests, under 90 seconds: before each commit
#   make performance  the tests of healthcheck-performance with torchao and torchft
#   make bench   the benchmarks behind the numbers in the documentation
#   make outward every plugin from its wheel, with the packages that it needs, in an environment of its own: minutes, needs an index
#   make docs    write the generated pages again
#   make golden  write the golden files again: published packs, the schema of rule files, messages about bad rule files, what a console shows

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FRAMEWORKS := $(VENV)/.frameworks
PERFORMANCE := $(VENV)/performance
# Two workers: CI has two cores, and more of them only wait for each other inside torch.
WORKERS ?= 2

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
# The tests start hundreds of processes: without bytecode each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test floors zoo faults check lint fast bench docs golden wheels outward performance clean
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

# torchao and torchft beside the environment: without their requirements, which would bring another torch, and out of the way of `make test`.
$(PERFORMANCE): $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ torchao==0.18.0 torchft-nightly==2026.10.26
	$(BIN)/python -m pip install --quiet --upgrade --target $@ opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
	touch $@

performance: $(PERFORMANCE)
	PYTHONPATH=$(abspath $(PERFORMANCE)) $(BIN)/python -m pytest -q plugins/healthcheck-performance/tests

demo: $(READY)
	$(BIN)/python examples/demo.py

# Code 75: no worker ran a test and none was handed out for ten minutes (tests/stalls.py). A test that fails or hangs is never tried again.
SUITE = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --durations=15 tests plugins

test: $(FRAMEWORKS)
	$(SUITE) || { test $$? -eq 75 && echo "pytest-xdist lost its workers: once more" && $(SUITE); }

# The declared floors, beside the environment: PYTHONPATH comes before it. Without their requirements, which would bring another torch.
FLOORS := transformers==4.45.0 accelerate==1.0.0 lightning==2.4.0 pytorch-lightning==2.4.0 "tokenizers<0.21" "huggingface_hub<1" "torchmetrics<1.5" \
	"lightning-utilities<0.12"
$(VENV)/floors: $(FRAMEWORKS)
	$(BIN)/python -m pip install --quiet --no-deps --target $@ $(FLOORS)
	touch $@

floors: $(VENV)/floors
	PYTHONPATH=$(abspath $(VENV)/floors) $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile tests/trainers/conformance \
		$(foreach what,accelerate attach changes_nothing framework_ranks frameworks huggingface joined_rules lightning lightning_callbacks step_starts,\
		tests/trainers/test_$(what).py)

# Libraries that have no adapter of their own. Without their dependencies where these would bring another torch; torchvision's
# wheel is built for CUDA, so that whoever finds it beside a torch for CPUs cannot import it: it has a folder of its own.
ZOO := keras==3.15.1 fastai==2.8.12 skorch==1.4.0 pytorch-ignite==0.5.5 stable-baselines3==2.9.2 sentence-transformers==6.2.0
ZOO_NEEDS := h5py optree ml-dtypes namex scikit-learn scipy joblib threadpoolctl narwhals tabulate fastcore fasttransform plum-dispatch \
	beartype "fastprogress<1.1" fastdownload matplotlib pyparsing cycler kiwisolver fonttools contourpy cloudpickle gymnasium \
	farama-notifications opencv-python-headless polars polars-runtime-32 ultralytics-thop
VISION := torchvision==0.28.0 timm==1.0.31 ultralytics==8.4.190
# Builds an operator of its own at the first start: a minute or two, with a compiler.
DEEPSPEED := deepspeed==0.19.8 hjson msgpack py-cpuinfo ninja einops pydantic pydantic-core annotated-types typing-inspection

$(VENV)/.zoo: $(FRAMEWORKS)
	$(BIN)/python -m pip install --quiet --no-deps $(ZOO) $(ZOO_NEEDS)
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/vision $(VISION)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target $(VENV)/deepspeed $(DEEPSPEED)
	touch $@

zoo: $(VENV)/.zoo
	HEALTHCHECK_UPDATE_ZOO=1 $(BIN)/python -m pytest -q -n $(WORKERS) tests/zoo tests/trainers/test_held_out_everywhere.py
	HEALTHCHECK_UPDATE_ZOO=1 $(BIN)/python -m pytest -q -k "fault_is_found or stop_before or stop_ends or resum or survive" tests/trainers/conformance \
		$(foreach what,automodel dream megatron_bridge resume_script torchtitan,tests/trainers/test_$(what).py)
	$(BIN)/python docs/_generate.py

# Every toy fault and look-alike with three seeds: ten minutes and more.
faults: $(READY)
	HEALTHCHECK_TEST_SEEDS=0,1,2 $(BIN)/python -m pytest -n $(WORKERS) -q tests/faults/test_faults.py

check: lint fast

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=.:plugins/healthcheck-performance $(BIN)/mypy -p healthcheck_performance

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
