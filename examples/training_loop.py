"""A training loop that gives its vLLM every update: new weights, and KV-cache scales that fit them.

python examples/training_loop.py [MODEL]   where vLLM and fp8kv are installed
"""

import os
import sys
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import calib


def updates(model, batch, count=3):
    """Train; yield the loss of every update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(count):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def deliver(model, batch, llm):
    """Give the engine the weights as they are now, and scales that were measured with them."""
    weights = ((name, weight.detach().bfloat16()) for name, weight in model.named_parameters())
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    llm.reset_prefix_cache()  # it holds K and V of the weights before
    return calib.push_scales(llm, calib.scales_for(model, [batch], strategy="tensor"))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, which has the weights
    try:
        from vllm import LLM, SamplingParams
    except ImportError:
        sys.exit("this example needs vLLM in the environment of fp8kv: pip install vllm")
    name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
    options = {"dtype": "bfloat16", "max_model_len": 256, "enforce_eager": True}
    llm = LLM(name, kv_cache_dtype="fp8", gpu_memory_utilization=0.5, **options)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    text = " ".join(topics.values())
    batch = AutoTokenizer.from_pretrained(name)(text, return_tensors="pt").input_ids[:, :1024].view(8, 128)

    for step, loss in enumerate(updates(model, batch), 1):
        fingerprint = deliver(model, batch, llm)
        answer = llm.generate("A list in Python is", SamplingParams(temperature=0, max_tokens=16))[0]
        print(f"update {step}: loss {loss:.3f}, scales {fingerprint}: {answer.outputs[0].text!r}")
