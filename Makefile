include tools/environments.mk

.PHONY: help demo docs test test-slow ci check fix compile-kernels interop engines engines-cuda install-check pages gpu nightly clean

help: ## this list
	@grep -hE '^[a-z-]+%?:.*## ' Makefile | sed 's/:.*## /\t/' | expand -t 17

demo: $(VENV)/.installed ## calibrate a real model on real text and write a checkpoint
	$(BIN)/fp8kv-calibrate builtin:smollm2 --dataset builtin:python-docs --strategy attn_head \
		--dtype float32 --samples 24 --seq-len 512 --output build/demo --overwrite

test: $(VENV)/.installed ## what every change must pass; no GPU, no network
	$(PYTEST) -m "not (slow or nightly)"

test-slow: $(VENV)/.installed ## the rest of CI's tests: browser, notebook, real models, PTX, mutants of kernels
	$(PYTEST) -m "slow and not nightly"

test-%: ## tests beyond these: nightly, shuffled, mutants, ptx, ptx-oldest, ptx-mutations, fuzz (make test-help)
	@$(MAKE) --no-print-directory -f tests/Makefile $*

ci: ## exactly what CI runs, half an hour on two cores
	env -u MAKEFLAGS -u MAKELEVEL .ci/run

check: $(VENV)/.installed ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

fix: $(VENV)/.installed ## what the linter can put right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.installed ## the documentation as a site, in build/site
	# --quiet would hide warnings from --strict too
	$(BIN)/python -m mkdocs build --strict

pages: $(VENV)/.installed ## write what is generated in docs/: engines, caches, formats, the picture of the house
	for page in engines_page caches_page formats_table house_picture; do \
		$(BIN)/python tools/$$page.py || exit 1; \
	done

install-check: export UV_TORCH_BACKEND ?= cpu
install-check: $(VENV)/.installed ## wheel and sdist in empty environments: every Python found, oldest and newest versions
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tests/install/check_install.py

GPUS ?=

compile-kernels: $(VENV)/.installed ## every kernel for every GPU, without one; no spills, no slow loads
	$(BIN)/python benchmarks/compile_kernels.py $(if $(GPUS),--target $(GPUS))

interop: ## our outputs in vLLM (CPU), SGLang's classes and transformers: all of it, an hour and more
	@$(MAKE) --no-print-directory -f tests/interop/Makefile all

interop-%: ## a part of it: scales, live, watch, classes, models and others (make interop-help)
	@$(MAKE) --no-print-directory -f tests/interop/Makefile $*

engines: ## the section `classes` of calib/engines/*.yaml: which scales each model class loads
engines-cuda: ## the same for a vLLM that is built for GPUs alone; none is needed
engines engines-cuda:
	@$(MAKE) --no-print-directory -f tests/interop/Makefile $@

bench-%: ## measurements: calibration, eval, caches, kernels and others (make bench-help)
	@$(MAKE) --no-print-directory -f benchmarks/Makefile $*

# `+`: make --dry-run lists the queue as DRY_RUN=1 does
DRY_RUN ?= $(findstring n,$(firstword -$(MAKEFLAGS)))

gpu: ## all that waits for a GPU, unattended; a second start goes on; --dry-run lists it
	+$(firstword $(wildcard $(BIN)/python) $(PYTHON)) benchmarks/gpu_queue.py $(if $(DRY_RUN),--dry-run)

nightly: test-nightly test-shuffled test-mutants test-ptx test-ptx-oldest compile-kernels interop install-check ## what CI has no time for, hours

clean: ## remove all environments, and what was built
	rm -rf build $(VENV) $(INTEROP) $(CUDA_BUILD) $(PEERS)*
