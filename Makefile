# Needs Python 3.11 or later and make. Every target sets up what it needs in .venv and is
# instant when pyproject.toml and constraints.txt have not changed. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BENCH_VENV := .venv-bench
LOWEST_VENV := .venv-lowest
AUDIT_VENV := .venv-audit
BIN := $(VENV)/bin
BENCH_BIN := $(BENCH_VENV)/bin
DEV_STAMP := $(VENV)/.installed
BENCH_STAMP := $(BENCH_VENV)/.installed
LOWEST_STAMP := $(LOWEST_VENV)/.installed
AUDIT_STAMP := $(AUDIT_VENV)/.installed
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
# Waiting threads sleep: spinning ones would take the cores from the processes beside them, which makes the tests ten times as long.
THREADS := OMP_NUM_THREADS=1 OMP_NUM_THREADS=2
PORTABLE_ENV := OMP_WAIT_POLICY=passive

# What depends on other packages than PyTorch; numbers do not.
LOWEST_TESTS := tests/cli tests/integrations tests/analysis tests/evaluation tests/data tests/posteriors tests/baselines \
	tests/laplace/test_auto.py tests/laplace/test_saving.py tests/test_package.py tests/test_progress.py tests/test_saved_by_version1.py

# Old packages use what newer ones below them have deprecated, and an old peft speaks of models without a name.
LOWEST_WARNINGS := -W ignore::DeprecationWarning -W ignore::FutureWarning -W 'ignore:Could not find a config file:UserWarning'

PIP_ENV := PIP_DISABLE_PIP_VERSION_CHECK=1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-portable test-slow test-faults test-kills mutants test-peers test-lowest browser-setup lint format docs release audit bench-setup bench bench-quality clean distclean

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

# The lowest versions that pyproject.toml allows; PyTorch is the tested release, and tools of the tests are not lowered.
$(LOWEST_STAMP): pyproject.toml constraints.txt tests/lowest.py
	$(call make_venv,$(LOWEST_VENV))
	$(LOWEST_VENV)/bin/python -m tests.lowest > $(LOWEST_VENV)/constraints.txt
	$(PIP_ENV) $(LOWEST_VENV)/bin/python -m pip install --quiet -c $(LOWEST_VENV)/constraints.txt -e '.[all]' pytest pytest-xdist hypothesis
	@touch $@

$(AUDIT_STAMP): Makefile
	$(call make_venv,$(AUDIT_VENV))
	$(PIP_ENV) $(AUDIT_VENV)/bin/python -m pip install --quiet 'bandit>=1.9' 'pip-audit>=2.10'
	@touch $@

setup: $(DEV_STAMP) ## set up .venv for development

demo: $(DEV_STAMP) ## train a small network on digits, make it Bayesian, write demo/report.html
	$(BIN)/python -m aftermap demo

test: $(DEV_STAMP) ## run the tests and doctests (PYTEST_ARGS="-k kron" narrows them)
	$(TEST_ENV) $(BIN)/python -m pytest -q $(IN_PARALLEL) $(PYTEST_ARGS)

test-portable: $(DEV_STAMP) ## run the numerical tests as other processors would, six times
	@failed=; for arithmetic in $(ARITHMETICS); do for threads in $(THREADS); do \
		echo "$$arithmetic $$threads"; \
		env $(PORTABLE_ENV) $$arithmetic $$threads $(BIN)/python -m pytest -q $(IN_PARALLEL) $(NUMERICAL_TESTS) $(PYTEST_ARGS) || failed="$$failed\n  $$arithmetic $$threads"; \
	done; done; \
	if test -n "$$failed"; then printf "tests failed under:$$failed\n"; exit 1; fi

test-slow: $(DEV_STAMP) ## run the slow tests only
	$(TEST_ENV) $(BIN)/python -m pytest -q -m "slow and not peers" $(PYTEST_ARGS) || test $$? -eq 5 # 5: none yet

FAULTS := PYTHONPATH=src:. OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults

# Two programs at a time. Each can be run alone, such as `python -m tests.faults.folders`.
test-faults: $(DEV_STAMP) ## damage folders and data files, kill jobs and processes, run long, weaken priors; write docs/reliability.md
	$(FAULTS) $(FAULT_ARGS)

test-kills: $(DEV_STAMP) ## kill save, tune, predict, report, fit and train two hundred times, and write docs/reliability.md
	$(FAULTS).kills
	$(FAULTS).page

# Results are kept after every mutant: stopped and started again, it goes on. MUTANT_ARGS="--sample 60" tries fewer.
mutants: $(DEV_STAMP) ## put small errors into the numerical core, and count how many the tests find
	PYTHONPATH=src:. OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants $(MUTANT_ARGS); code=$$?; \
	PYTHONPATH=src $(BIN)/python -m tests.faults.page; exit $$code

test-peers: $(BENCH_STAMP) ## compare with other libraries, in .venv-bench
	$(TEST_ENV) $(BENCH_BIN)/python -m pytest -q -m peers tests/peers $(PYTEST_ARGS)

test-lowest: $(LOWEST_STAMP) ## run the tests of the library and the commands with the lowest versions of the dependencies
	$(TEST_ENV) $(LOWEST_VENV)/bin/python -m pytest -q $(IN_PARALLEL) $(LOWEST_WARNINGS) $(LOWEST_TESTS) $(PYTEST_ARGS)

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

release: $(DEV_STAMP) ## build the wheel and the source distribution in dist/, with a bill of materials and SHA-256 sums
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(BIN)/python -m tests.release dist

# Needs the network: a package whose known weaknesses cannot be asked for is an error (--strict), not a pass.
audit: $(AUDIT_STAMP) ## look for weaknesses: bandit reads the source, pip-audit asks for those of the tested dependencies
	$(AUDIT_VENV)/bin/bandit -q -c pyproject.toml -r src
	$(AUDIT_VENV)/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt

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
	rm -rf $(VENV) $(BENCH_VENV) $(LOWEST_VENV) $(AUDIT_VENV)
