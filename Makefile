PYTHON ?= $(shell python3.11 -c 'print("python3.11")' 2>/dev/null || echo python3)

.PHONY: help setup lint test test-slow browser demo lists docs zoo fuzz bench contest call-path lock audit release clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile

setup: .venv/.installed ## create .venv with the locked packages and bayesify itself

lint: setup ## check style, format and types
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

CHROMIUM = command -v chromium || command -v chromium-browser || command -v google-chrome

# Two workers with torch's default threads would each take every core. Each takes whole files, so that what the tests of
# a file share, such as a trained network or a browser, is made once.
PYTEST = OMP_NUM_THREADS=1 .venv/bin/pytest -n 2 --dist loadfile
test: lint ## lint, then run the tests and doctests, except for the slow ones
	@($(CHROMIUM)) >/dev/null || echo "no browser: the tests of pages are skipped; 'make browser' installs one"
	$(PYTEST)

test-slow: setup ## run the tests that take long, such as those of the source distribution; before a release
	$(PYTEST) -m slow

INSTALL = apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install chromium
browser: ## install Debian's chromium for the tests of pages, unless there is a browser
	@if ($(CHROMIUM)) >/dev/null; then exit 0; fi; \
	if ! command -v apt-get >/dev/null; then echo "no chromium and no apt-get to install it with"; \
	elif [ "$$(id -u)" = 0 ]; then ($(INSTALL)) || echo "chromium could not be installed"; \
	elif sudo -n true 2>/dev/null; then sudo -n sh -c '$(INSTALL)' || echo "chromium could not be installed"; \
	else echo "no chromium, and no right to install it; as root: apt-get install chromium"; fi

demo: setup ## run the demo
	.venv/bin/python examples/demo.py

lists: setup ## write the lists of methods in README.md and docs/index.md from the registry, and docs/reproduction.md
	.venv/bin/python -m docs.method_lists

# Material advertises its successor unless told not to.
docs: .venv-docs/.installed ## execute the tutorials and build the documentation in site/; make docs TUTORIALS=table executes one
	.venv-docs/bin/python -m docs.site.execute $(TUTORIALS)
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

zoo: .venv-zoo/.installed ## test against the models of torchvision, timm and transformers
	.venv-zoo/bin/pytest zoo

MINUTES = 10
fuzz: setup ## try random networks, methods and options against independent oracles: make fuzz MINUTES=60
	PYTHONPATH=tests OMP_NUM_THREADS=1 .venv/bin/python -m fuzz --minutes $(MINUTES) $(FUZZ)

# glibc would give memory back and ask for it again in every step, at random as many pages for one network or the other.
STEADY = MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_MMAP_THRESHOLD_=4000000000
bench: .venv-bench/.installed ## measure what being Bayesian costs, beside other libraries (half an hour on two quiet cores)
	$(STEADY) .venv-bench/bin/python -m benchmarks.speed $(BENCH)

CONTEST = run
contest: setup ## compare methods with what people would do instead, then write results and README's claims; resumable
	.venv/bin/python -m benchmarks.contest $(CONTEST)
	.venv/bin/python -m benchmarks.contest report

call-path: setup ## count the calls, files and lines that a layer, a prediction and a training step go through
	.venv/bin/python -m benchmarks.call_path $(CALL_PATH)

LOCKS = $(wildcard requirements*.lock)
lock: setup ## write the hashes of all locked packages into the lock files, after a version in them was changed
	.venv/bin/python tools/lock.py $(LOCKS)

# The lock files have everything that they need, so pip-audit need not install anything to find out.
# A package that can't be looked up, as without a connection, is an error.
audit: .venv-audit/.installed ## look up known vulnerabilities of all locked packages
	.venv-audit/bin/pip-audit --strict --disable-pip --require-hashes --progress-spinner off $(LOCKS:%=-r %)

# Built from the files of the last commit alone, by the locked build backend.
BUILD = from setuptools import build_meta as b; print(b.build_sdist("../dist")); print(b.build_wheel("../dist"))
release: setup ## build sdist and wheel in dist/ from the last commit; refuses a tree with uncommitted changes
	@if [ -n "$$(git status --porcelain)" ]; then git status --short; echo "commit or remove these first"; exit 1; fi
	rm -rf build dist && mkdir build dist
	git archive HEAD | tar -x -C build
	cd build && SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) ../.venv/bin/python -c '$(BUILD)' >../dist/.log
	rm -rf build dist/.log
	cd dist && sha256sum * >SHA256SUMS && cat SHA256SUMS

clean: ## remove the environments, builds and caches
	rm -rf .venv .venv-zoo .venv-bench .venv-docs .venv-audit build dist site src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A local build of torch that pip is configured to find, such as the one for CPUs, goes before the registry's: given
# hashes, pip would prefer a file whose hash the index tells. Where there is no local one, the second line installs it,
# and on Linux the third what the registry's build can't be imported without.
define install_locked
	sed -n '/^torch==/,/[^\\]$$/p' $(2) >$(1)/torch.lock
	$(1)/bin/pip install --quiet --no-deps --require-hashes --no-index -r $(1)/torch.lock 2>/dev/null || true
	$(1)/bin/pip install --quiet --no-deps --require-hashes -r $(2)
	$(1)/bin/python -c 'import torch' 2>/dev/null || \
		$(1)/bin/pip install --quiet --no-deps --require-hashes -r requirements-cuda.lock
endef

# Without build isolation, so that the build backend too is the locked one.
.venv/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(call install_locked,.venv,requirements.lock)
	.venv/bin/pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

.venv-audit/.installed: requirements-audit.lock
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install --quiet --no-deps --require-hashes -r requirements-audit.lock
	echo '*' >.venv-audit/.gitignore
	touch $@

# The environments of zoo, bench and docs.
.venv-%/.installed: requirements-%.lock pyproject.toml
	$(PYTHON) -m venv .venv-$*
	$(call install_locked,.venv-$*,requirements-$*.lock)
	.venv-$*/bin/pip install --quiet --no-deps --no-build-isolation -e .
	touch $@
