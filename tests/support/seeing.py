"""Tiny models that take pictures or sound, saved with real processors and chat templates."""

import json
import wave

import numpy as np
import torch
import transformers
from families import tiny_listening_model, tiny_vision_language_model
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

classes = transformers.models
_SPECIAL = ["<pad>", "<s>", "</s>", "<image>", "<boi>", "<eoi>", "<fake_token_around_image>"]
_SPECIAL += ["<end_of_utterance>", "<global-img>", *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2))]
_SPECIAL += ["<audio>"]
_NAMES = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
_NAMES["extra_special_tokens"] = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
_NAMES["extra_special_tokens"]["audio_token"] = "<audio>"
IMAGE, AUDIO = map(_SPECIAL.index, ("<image>", "<audio>"))
PLACES = {"llava": "<image>", "gemma3": "<boi>", "idefics3": "<image>", "qwen3_5": "<boi><image><eoi>"}
PLACES |= {"paddleocr_vl": "<boi><image><eoi>", "qwen2_audio": "<audio>", "glmasr": "<audio>"}
_PART = "{% if part.type != 'text' %}PLACE{% else %}{{ part.text }}{% endif %}"
_TEMPLATE = "{% for m in messages %}{{ m.role }}: {% for part in m.content %}" + _PART
_TEMPLATE += "{% endfor %}{{ '\\n' }}{% endfor %}"
_SIZE = {"height": 28, "width": 28}


def seeing_model(family):
    sizes = {"vocab_size": 272, "max_position_embeddings": 512, "sliding_window": 512}
    if PLACES.get(family) == "<audio>":
        return tiny_listening_model(family, **sizes)
    model = tiny_vision_language_model(family, **sizes)
    model.config.image_token_id = IMAGE
    return model


def seeing_smollm2(source):
    """SmolLM2 behind a random tower, whose projector has a direction that V of layer 3 is largest for."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"extra_special_tokens": _SPECIAL[3:]})
    text, config = AutoModelForCausalLM.from_pretrained(source), seeing_model("idefics3").config
    text.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    config.image_token_id, config.text_config = tokenizer.convert_tokens_to_ids("<image>"), text.config
    config.tie_word_embeddings = True
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.model.text_model, model.lm_head = text.model, text.lm_head
    layer, projector = text.model.layers[3], model.model.connector.modality_projection.proj.weight.data
    rows = layer.self_attn.v_proj.weight.data * layer.input_layernorm.weight.data
    planted = torch.outer(rows[rows.norm(dim=1).argmax()], projector[0])
    projector += 1000 * planted / planted.norm()
    return model, tokenizer


def save_seeing(family, directory, model=None, tokenizer=None):
    """Save a model with a processor; its tokenizer has a token for each byte, after the special ones."""
    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bare = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bare.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    own = {"tokenizer": tokenizer or PreTrainedTokenizerFast(tokenizer_object=bare, **_NAMES)}
    own["chat_template"] = _TEMPLATE.replace("PLACE", PLACES[family])
    if family == "gemma3":
        pictures = classes.gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil(size=_SIZE)
        processor = transformers.Gemma3Processor(pictures, image_seq_length=1, **own)
    elif family == "idefics3":  # up to four tiles and the whole, one token each
        sizes = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
        pictures = classes.idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil(**sizes)
        processor = transformers.Idefics3Processor(pictures, image_seq_len=1, **own)
    elif PLACES[family] == "<boi><image><eoi>":  # a token for four patches
        kinds = {"qwen3_5": classes.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil}
        processing = classes.paddleocr_vl.image_processing_pil_paddleocr_vl
        kinds["paddleocr_vl"] = processing.PaddleOCRVLImageProcessorPil
        pictures = kinds[family](size={"shortest_edge": 28**2, "longest_edge": 56**2}, patch_size=14)
        processor = transformers.PaddleOCRVLProcessor(pictures, **own)
    elif PLACES[family] == "<audio>":
        sounds = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
        own |= {"audio_token": "<audio>"}
        kinds = {"qwen2_audio": transformers.Qwen2AudioProcessor, "glmasr": transformers.GlmAsrProcessor}
        processor = kinds[family](sounds, **own)
    else:
        own |= {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        sizes = {"size": {"shortest_edge": 28}, "crop_size": _SIZE}
        pictures = classes.clip.image_processing_pil_clip.CLIPImageProcessorPil(**sizes)
        processor = transformers.LlavaProcessor(pictures, patch_size=14, **own)
    (model or seeing_model(family)).save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def write_rows(folder, ending="png"):
    """Write pictures, or sounds, of noise, and rows that ask about one or two of them."""
    generator, rows = np.random.default_rng(0), []
    for names in ("0", "1", "23"):
        files = [f"{name}.{ending}" for name in names]
        for file in files:
            pixels = generator.integers(0, 256, (40 + 9 * len(rows), 50, 3), dtype=np.uint8)
            if ending == "png":
                Image.fromarray(pixels).save(folder / file)
                continue
            with wave.open(str(folder / file), "wb") as sound:
                sound.setparams((1, 2, 16000, 0, "NONE", None))
                sound.writeframes(pixels.tobytes())
        rows.append({"question": f"What is on picture {len(rows)} here?", "shown": files})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def read_media(folder, row, family):
    """What a processor is given of a row."""
    if PLACES[family] != "<audio>":
        return {"images": [[Image.open(folder / name) for name in row["shown"]]]}
    codes = [np.fromfile(folder / name, "<i2", offset=44) for name in row["shown"]]  # behind a header
    return {"audio": [each.astype(np.float32) / 2**15 for each in codes], "sampling_rate": 16000}
