# A fresh machine needs only Python and make: `make demo`, `make check` and `make test` install everything else.

PYTHON ?= python3
# set TORCH to install another version or build; an installed torch is kept
TORCH ?= torch==2.13.0
# number of test processes
WORKERS ?= 2
# duration of the tests on two idle cores, and total size of their environments
TEST_MINUTES := 45
TEST_SIZE := 8.2 GB
VENV := .venv
DEMO := .venv-demo
BARE := .venv-bare
BENCH := .venv-bench
GPU := .venv-gpu
# an installation in place builds the kernel beside its source
KERNEL := $(wildcard torch_gradmon/statistics/cpp_kernel.cpp torch_gradmon/statistics/kernel_build.py)

# each trainer with its extra and the loggers that its tests read, on top of the bare environment
TRAINERS := lightning transformers ignite accelerate deepspeed torchtitan
lightning_extras := lightning,tensorboard
transformers_extras := transformers,accelerate,wandb,tensorboard,trackio
ignite_extras := ignite,tensorboard
accelerate_extras := accelerate,tensorboard
deepspeed_extras := deepspeed,transformers,accelerate
torchtitan_extras := torchtitan,torchtune
torchtitan_tests := tests/test_integration_torchtune.py
lightning_tests := tests/test_ten_programs.py
transformers_tests := tests/test_ten_programs.py

# tests of numbers and of unchanged training
NUMBERS := tests/test_oracle.py tests/test_no_change.py tests/test_statistics.py

.PHONY: demo check test announce test-all test-gpu bench-gpu test-torch test-eager test-compiled test-wheel test-integrations lint house bench bench-spikes bench-faults bench-external bench-foresight bench-widths bench-reports images docs gallery browser clean

demo: $(DEMO)/.ready
	$(DEMO)/bin/gradmon demo

# what a change is checked by: the linters, and the tests that need torch and pytest alone, no group of processes and little time
QUICK := not (slow or gpu or extra or integration or ranks or thorough)
check: $(VENV)/.ready $(BARE)/.ready
	$(MAKE) lint
	$(BARE)/bin/python -m pytest -q -n $(WORKERS) -m "$(QUICK)"

# the same first, then the other tests without optional packages, then those that need some
test: announce $(VENV)/.ready $(BARE)/.ready browser
	$(MAKE) check
	$(BARE)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile -m "(ranks or thorough) and not (slow or gpu or extra or integration)"
	$(MAKE) test-eager test-wheel docs
	$(VENV)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile -m "extra and not slow and not gpu" $$(grep -l "mark\.extra" tests/test_*.py)
	$(MAKE) --jobs $(WORKERS) --output-sync=target test-integrations

missing = $(strip $(foreach environment,$(VENV) $(BARE) $(TRAINERS:%=.venv-%),$(if $(wildcard $(environment)/.ready),,$(environment))))

announce:
	@echo "make test: $(if $(missing),installs $(missing) (all of them: $(TEST_SIZE) with a torch for the CPU); then )runs the linters, the tests" \
		"without optional packages, those that need some, and those of the trainers:" \
		"about $(TEST_MINUTES) minutes on two idle cores."

test-integrations: $(TRAINERS:%=test-%)

.PHONY: $(TRAINERS:%=test-%)
$(TRAINERS:%=test-%): test-%: .venv-%/.ready
	.venv-$*/bin/python -m pytest -q -m integration tests/test_integration_$*.py $($*_tests)

test-all: $(VENV)/.ready $(BARE)/.ready browser
	$(BARE)/bin/python -m pytest -q -m "not gpu and not extra and not integration"
	$(MAKE) test-eager test-compiled test-wheel
	$(VENV)/bin/python -m pytest -q -m "not gpu"
	$(MAKE) --jobs $(WORKERS) --output-sync=target test-integrations
	$(MAKE) lint

# the numbers, and that training stays the same, where something else than the built kernel computes statistics
test-eager test-compiled: test-%: $(BARE)/.ready
	$(BARE)/bin/python -m pytest -q -n $(WORKERS) -m "not slow and not gpu" --statistics $* $(NUMBERS)

# a wheel, installed where no compiler is, uses its kernel
test-wheel: $(BARE)/.ready
	rm -rf dist build
	$(BARE)/bin/pip wheel --quiet --no-deps --wheel-dir dist .
	$(BARE)/bin/pip install --quiet --no-deps --target build/installed dist/*.whl
	cd build/installed && PATH=/nowhere $(abspath $(BARE))/bin/python -c "from torch_gradmon.cli.main import main; main(['doctor'])" | tee doctor.txt
	grep --quiet "came with the package" build/installed/doctor.txt

# the tests without optional packages on another release of torch, in an environment of its own: make test-torch VERSION=2.6.0
# Releases on PyPI come with CUDA, 5 GB and more each. numpy, which some of them import.
VERSION ?= 2.6.0
test-torch: .venv-torch-$(VERSION)/.ready
	.venv-torch-$(VERSION)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile -m "not slow and not gpu and not extra and not integration"

.venv-torch-%/.ready: $(KERNEL)
	test -x .venv-torch-$*/bin/python || $(PYTHON) -m venv .venv-torch-$*
	.venv-torch-$*/bin/pip install --quiet torch==$* numpy
	.venv-torch-$*/bin/pip install --quiet --editable ".[test]" torch==$*
	touch $@

# all tests that need an NVIDIA GPU; without one the same loops on the simulated device
test-gpu: $(GPU)/.ready
	@if $(GPU)/bin/python -c "$(HAS_GPU)"; then \
		$(GPU)/bin/python -m pytest -q -m gpu --session-timeout 480 $$(grep -l "mark\.gpu" tests/test_*.py); \
	else \
		$(GPU)/bin/python -m pytest -q -m "not gpu" tests/test_gpu.py && echo "$(NO_GPU)"; \
	fi

# what the monitor costs on one; without one the same program on the simulated device, which writes nothing
bench-gpu: $(GPU)/.ready
	@if $(GPU)/bin/python -c "$(HAS_GPU)"; then \
		$(MAKE) $(GPU)/.rivals && $(GPU)/bin/python -m benchmarks.gpu; \
	else \
		$(GPU)/bin/python -W ignore -m benchmarks.gpu --dry-run && echo "$(NO_GPU)"; \
	fi

HAS_GPU := import sys, torch; sys.exit(not torch.cuda.is_available())
NO_GPU := There is no GPU here: this was a dry run on the simulated device, and nothing was run or measured on a GPU.

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# the measures of tests/house.py and of docs/contributing/ledger.md as they are now, ready to paste
house: $(VENV)/.ready
	@$(VENV)/bin/python -W ignore -m tests.house

# the documentation as a site that works from the disk; any warning is an error
docs: $(VENV)/.ready
	rm -rf docs/_build
	$(VENV)/bin/sphinx-build --quiet --fail-on-warning --keep-going -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

# the gallery's pages and pictures, from real trainings: two minutes
gallery: $(VENV)/.ready
	rm -rf docs/gallery
	$(VENV)/bin/python -m benchmarks.gallery

bench: $(BENCH)/.ready
	$(BENCH)/bin/python benchmarks/import_time.py
	$(BENCH)/bin/python -m benchmarks.run
	$(BENCH)/bin/python -m benchmarks.idle
	$(BENCH)/bin/python -m benchmarks.sinks
	$(BENCH)/bin/python -m benchmarks.stored
	$(BENCH)/bin/python -m benchmarks.activations
	$(BENCH)/bin/python -m benchmarks.exchange
	$(BENCH)/bin/python -m benchmarks.acting
	$(BENCH)/bin/python -m benchmarks.report

# spike rules on labelled curves of real runs and on synthetic ones
bench-spikes: $(BENCH)/.ready
	$(BENCH)/bin/python -m benchmarks.spikes

# recall and false alarms of the diagnosis on the zoo of faults
bench-faults: $(VENV)/.ready
	$(VENV)/bin/python -m benchmarks.faults.judging

# the same on trainings that other people broke, and on sound ones
bench-external: $(VENV)/.ready
	$(VENV)/bin/python -m benchmarks.external.judging
	$(VENV)/bin/python -m benchmarks.external.repairing

# how early signals come before a divergence, and how often in vain
bench-foresight: $(VENV)/.ready
	$(VENV)/bin/python -m benchmarks.foresight.judging
	$(VENV)/bin/python -m benchmarks.foresight.cost

# size of reports, and time to open them
bench-reports: $(VENV)/.ready browser
	$(VENV)/bin/python -m benchmarks.reports

# exponents of layers over the width, and their picture
bench-widths: $(VENV)/.ready
	$(VENV)/bin/python -m benchmarks.width_sweep

# the pictures of the documentation
images: $(VENV)/.ready browser
	$(VENV)/bin/gradmon demo -o images/demo.svg
	$(VENV)/bin/python -m tests.browser runs/demo/report.html images/report.png
	$(VENV)/bin/python examples/two_runs.py
	$(VENV)/bin/gradmon report runs/two/before runs/two/after -o runs/two/diff.html
	$(VENV)/bin/python -m tests.browser runs/two/diff.html images/diff.png
	$(VENV)/bin/python examples/spikes.py images/spikes.png
	$(VENV)/bin/python -m benchmarks.width_sweep
	$(VENV)/bin/python examples/article_study.py --image images/article_study.svg
	$(VENV)/bin/python -m tests.browser
	$(VENV)/bin/python -m tests.test_server_pages images
	$(VENV)/bin/jupyter nbconvert --to notebook --execute --inplace examples/first_look.ipynb

# Debian's Chromium where it can be installed; without one the browser tests are skipped
browser:
	@(command -v chromium && command -v chromedriver) >/dev/null \
		|| (apt-get update -qq && apt-get install -y -qq chromium chromium-driver) >/dev/null 2>&1 \
		|| echo "no Chromium, and it cannot be installed: browser tests are skipped"

$(VENV)/.ready: pyproject.toml $(KERNEL)
	@echo "$(VENV): installs everything for tests and tools, 3.5 GB with a torch for the CPU"
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -c "import torch" 2>/dev/null || $(VENV)/bin/pip install --quiet $(TORCH)
	$(VENV)/bin/pip install --quiet --editable ".[dev]"
	touch $@

$(DEMO)/.ready: pyproject.toml $(KERNEL)
	@echo "$(DEMO): installs rich, tqdm, plotly, jinja2 and numpy, 0.2 GB, and $(TORCH) unless a torch is installed:" \
		"0.9 GB, or several where it comes with CUDA"
	test -x $(DEMO)/bin/python || $(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -c "import torch" 2>/dev/null || $(DEMO)/bin/pip install --quiet $(TORCH)
	$(DEMO)/bin/pip install --quiet --editable ".[cli,report]"
	touch $@

$(BARE)/.ready: pyproject.toml $(KERNEL)
	@echo "$(BARE): installs torch, numpy and pytest alone, 0.9 GB with a torch for the CPU"
	test -x $(BARE)/bin/python || $(PYTHON) -m venv $(BARE)
	$(BARE)/bin/python -c "import torch" 2>/dev/null || $(BARE)/bin/pip install --quiet $(TORCH)
	$(BARE)/bin/pip install --quiet --editable ".[test]"
	touch $@

$(BENCH)/.ready: pyproject.toml $(KERNEL)
	@echo "$(BENCH): installs torch and the packages that the benchmarks compare with"
	test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -c "import torch" 2>/dev/null || $(BENCH)/bin/pip install --quiet $(TORCH)
	$(BENCH)/bin/pip install --quiet --editable ".[bench]" $(TORCH)
	touch $@

# all that PYTHON has, which keeps an installed torch for CUDA; a machine without a network is ready if that is enough. The checkout is
# not installed: the programs run in it.
$(GPU)/.ready: pyproject.toml
	@echo "$(GPU): uses the packages of $(PYTHON), and installs $(TORCH) and pytest where they are missing"
	test -x $(GPU)/bin/python || $(PYTHON) -m venv $(GPU) || $(PYTHON) -m venv --without-pip $(GPU)
	$(PYTHON) -c "import site, sysconfig; print(*{sysconfig.get_path('purelib'), *site.getsitepackages()}, sep='\n')" \
		> $$($(GPU)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/installed.pth
	$(GPU)/bin/python -c "import torch" 2>/dev/null || $(GPU)/bin/python -m pip install --quiet $(TORCH)
	$(GPU)/bin/python -c "import hypothesis, pytest, pytest_timeout" 2>/dev/null \
		|| $(GPU)/bin/python -m pip install --quiet "pytest>=8" "pytest-timeout>=2.3" "hypothesis>=6.100"
	touch $@

# packages that the statistics are compared with
$(GPU)/.rivals: $(GPU)/.ready
	$(GPU)/bin/python -c "import torch_module_monitor, wandb" 2>/dev/null \
		|| $(GPU)/bin/python -m pip install --quiet --retries 1 torch-module-monitor==0.1.0 "wandb>=0.19" \
		|| echo "torch-module-monitor or wandb cannot be installed: the benchmark leaves them out"
	touch $@

.venv-%/.ready: pyproject.toml $(BARE)/.ready
	@echo ".venv-$*: installs $($*_extras) on top of $(BARE), up to 1.8 GB"
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	$(BARE)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$(.venv-$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/bare.pth
	.venv-$*/bin/pip install --quiet --editable ".[test,$($*_extras)]"
	touch $@

clean:
	rm -rf $(VENV) $(DEMO) $(BARE) $(BENCH) $(GPU) $(TRAINERS:%=.venv-%) .venv-torch-* .mypy_cache .pytest_cache .ruff_cache .hypothesis
