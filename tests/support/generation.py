"""`fp8kv generate` beside transformers' own generation."""

import json
from contextlib import nullcontext

from command_line import fp8kv, succeeded
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8kv_runtime.hf import fp8_attention

PROMPT = "w5 w81 w7 w44 w9 w3"


def generate(*arguments):
    return fp8kv("generate", *arguments, "--device", "cpu", "--max-new-tokens", "9")


def as_json(*arguments):
    return json.loads(succeeded(generate(*arguments, "--json")).stdout)


def continuation(directory, scales=None):
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    inputs = AutoTokenizer.from_pretrained(directory)(PROMPT, return_tensors="pt")
    with fp8_attention(model, scales) if scales else nullcontext():
        output = model.generate(**inputs, max_new_tokens=9, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()
