# Needs Python 3.11 or later and make. Every target sets up what it needs in .venv and is
# instant when pyproject.toml and constraints.txt have not changed. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BENCH_VENV := .venv-bench
BIN := $(VENV)/bin
BENCH_BIN := $(BENCH_VENV)/bin
DEV_STAMP := $(VENV)/.installed
BENCH_STAMP := $(BENCH_VENV)/.installed
PYTEST_ARGS ?=
QUALITY_ARGS ?=

# The tensors in the tests are small: one thread is faster than several, and more repeatable.
TEST_ENV := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}
# Test files are shared out over this many processes; all tests of a file run in one process, which keeps its fixtures.
TEST_PROCESSES ?= auto
IN_PARALLEL := --numprocesses $(TEST_PROCESSES) --dist loadfile

# What must not depend on the processor, and how one processor behaves like another: the vector instructions of PyTorch,
# the order of summation in MKL, the number of threads. `make test-portable` takes each combination once.
NUMERICAL_TESTS := tests/curvature tests/posteriors tests/predictive tests/laplace tests/optim tests/hessian_free \
	tests/metrics tests/baselines tests/test_gram_sum.py tests/test_krylov.py tests/test_linalg.py \
	tests/test_likelihoods.py tests/test_prior.py tests/test_saved_by_version1.py --ignore=tests/baselines/test_hmc.py
ARITHMETICS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE
THREADS := OMP_NUM_THREADS=1 OMP_NUM_THREADS=2

PIP_ENV := PIP_DISABLE_PIP_VERSION_CHECK=1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-portable test-slow test-faults test-kills mutants test-peers browser-setup lint format docs bench-setup bench bench-quality clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

define make_venv
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "aftermap needs Python 3.11 or later, got " + sys.version.split()[0] + "; run: make PYTHON=/path/to/python3.11")'
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef

$(DEV_STAMP): pyproject.toml constraints.txt
	$(call make_venv,$(VENV))
	$(PIP_ENV) $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

# Peers are installed without their dependencies: those ask for torchvision, whose release must match
# torch's build exactly. What they really import is listed in the same file.
$(BENCH_STAMP): pyproject.toml constraints.txt benchmarks/constraints-bench.txt
	$(call make_venv,$(BENCH_VENV))
	$(PIP_ENV) $(BENCH_BIN)/python -m pip install --quiet -c constraints.txt -e . scikit-learn pytest hypothesis
	$(PIP_ENV) $(BENCH_BIN)/python -m pip install --quiet --no-deps -r benchmarks/constraints-bench.txt
	$(BENCH_BIN)/python -c 'import aftermap, laplace, curvlinops, backpack, ivon'
	@touch $@

setup: $(DEV_STAMP) ## set up .venv for development

demo: $(DEV_STAMP) ## train a small network on digits, make it Bayesian, write demo/report.html
	$(BIN)/python -m aftermap demo

test: $(DEV_STAMP) ## run the tests and doctests (PYTEST_ARGS="-k kron" narrows them)
	$(TEST_ENV) $(BIN)/python -m pytest -q $(IN_PARALLEL) $(PYTEST_ARGS)

test-portable: $(DEV_STAMP) ## run the numerical tests as other processors would (takes six times as long as once)
	@failed=; for arithmetic in $(ARITHMETICS); do for threads in $(THREADS); do \
		echo "$$arithmetic $$threads"; \
		env $$arithmetic $$threads $(BIN)/python -m pytest -q $(NUMERICAL_TESTS) $(PYTEST_ARGS) || failed="$$failed\n  $$arithmetic $$threads"; \
	done; done; \
	if test -n "$$failed"; then printf "tests failed under:$$failed\n"; exit 1; fi

test-slow: $(DEV_STAMP) ## run the slow tests only
	$(TEST_ENV) $(BIN)/python -m pytest -q -m "slow and not peers" $(PYTEST_ARGS) || test $$? -eq 5 # 5: none yet

test-faults: $(DEV_STAMP) ## try damaged folders and data files, a long run and weak priors, and write docs/reliability.md
	PYTHONPATH=src OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.folders $(FAULT_ARGS)
	PYTHONPATH=src OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.data_files $(FAULT_ARGS)
	PYTHONPATH=src:. OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.soak
	PYTHONPATH=src:. OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.digits
	PYTHONPATH=src $(BIN)/python -m tests.faults.page

test-kills: $(DEV_STAMP) ## kill save, tune, predict, report, fit and train two hundred times, and write docs/reliability.md
	PYTHONPATH=src:. OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.kills
	PYTHONPATH=src $(BIN)/python -m tests.faults.page

# Results are kept after every mutant: stopped and started again, it goes on. MUTANT_ARGS="--sample 60" tries fewer.
mutants: $(DEV_STAMP) ## put small errors into the numerical core, and count how many the tests find
	PYTHONPATH=src:. OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants $(MUTANT_ARGS); code=$$?; \
	PYTHONPATH=src $(BIN)/python -m tests.faults.page; exit $$code

test-peers: $(BENCH_STAMP) ## compare with other libraries, in .venv-bench
	$(TEST_ENV) $(BENCH_BIN)/python -m pytest -q -m peers tests/peers $(PYTEST_ARGS)

browser-setup: ## install the browser of the report's tests (Debian and Ubuntu; needs root)
	apt-get install -y chromium chromium-driver

lint: $(DEV_STAMP) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_STAMP) ## rewrite the code in the common format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV_STAMP) ## build the documentation in site/, warnings are errors
	$(BIN)/mkdocs build --strict --quiet

bench-setup: $(BENCH_STAMP) ## set up .venv-bench with the peers

bench: $(BENCH_STAMP) ## run the benchmarks against the peers
	$(BENCH_BIN)/python -m benchmarks.run

# The data folder is AFTERMAP_DATA, or --data-dir in QUALITY_ARGS; benchmarks/README.md says what it holds.
bench-quality: $(BENCH_STAMP) ## does the default call help? many tasks, resumable (QUALITY_ARGS="--quick" tries it out)
	OMP_NUM_THREADS=1 $(BENCH_BIN)/python -m benchmarks.quality $(QUALITY_ARGS)

clean: ## remove caches and built files, keep the environments
	rm -rf site demo dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find $(wildcard src tests examples benchmarks experiments) -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## remove the environments too
	rm -rf $(VENV) $(BENCH_VENV)
