"""A byte-level tokenizer with BOS and a chat template, and a Llama small enough to sample from."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
)


@pytest.fixture(scope="session")
def tokenizer(byte_tokenizer):
    return byte_tokenizer(chat_template=CHAT_TEMPLATE)


@pytest.fixture
def tiny_llama():
    sizes = {"vocab_size": 200, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes, **ids)).eval()
