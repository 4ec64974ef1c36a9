"""No library draws bars of its own beside ours, or where --quiet and --progress ask for none."""

import gguf
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from calib.progress import library_bars_hidden

SIZE, HEADS, WORDS = 32, 2, 16


def write_gguf(path):
    """A Llama of one layer in GGUF, whose tensors transformers converts with a bar."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(SIZE)
    writer.add_feed_forward_length(SIZE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(WORDS)
    shapes = {"token_embd": (WORDS, SIZE), "output": (WORDS, SIZE), "output_norm": (SIZE,)}
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{name}": (SIZE, SIZE) for name in square}
    shapes |= {f"blk.0.{name}": (SIZE,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.ones(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_bar_of_gguf_is_hidden(tmp_path, capfd):
    write_gguf(tmp_path / "tiny.gguf")

    def load():
        AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file="tiny.gguf", quantization_config=GgufConfig(dequantize=True)
        )
        return capfd.readouterr().err

    with library_bars_hidden():
        assert load() == ""
    assert "Converting and de-quantizing GGUF tensors" in load()
