"""A byte-level tokenizer with BOS and a chat template, and a Llama small enough to sample from."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
)


@pytest.fixture(scope="session")
def byte_tokenizer():
    """Every byte is a token, so that the text behind any sample can be read back exactly."""

    def made(**special):
        alphabet = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()))
        backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(list(SPECIAL))
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | special
        return PreTrainedTokenizerFast(tokenizer_object=backend, **names)

    return made


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
