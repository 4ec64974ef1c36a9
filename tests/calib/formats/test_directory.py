"""Output directories: files, names, dtypes, values, config and card; weights that change meanwhile."""

import json
import os
import shutil
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import formats_table
import jinja2
import pytest
import torch
from command_line import SMALL, calibrate, fp8kv, json_of, one_line_error, ran, succeeded
from engine_fixtures import describe, make_scales
from families import LATENT, save_model, tiny_model, tiny_vision_language_model
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from calib import job
from calib.capture import resume
from calib.errors import InputError, UnsupportedExportError
from calib.files.atomic import atomic_directory
from calib.files.model_directory import open_model_directory
from calib.files.names import CALIBRATION_FILE, SCALES_SHARD
from calib.files.stored_scales import read_scales
from calib.formats import FORMATS, export, output
from calib.formats.card import format_card, render_card
from calib.formats.directory import check_output, write_checkpoint, write_documents
from calib.rescale import pipeline
from calib.transfer import convert, merge, repair, strip

GOLDEN = Path(__file__).parent / "golden"
CASES = [
    (name, strategy, targets)
    for name, target in FORMATS.items()
    for strategy in target.strategies
    for targets in (("kv", "qkv") if target.reads_q else ("kv",))
    if name != "fp8kv"  # statistics and recipe only: nothing engine-specific to pin
]
OLD, RENAMED = "model.layers.0.self_attn", "model-00001-of-00001.safetensors"


def write(checkpoint, out, weights="link"):
    with atomic_directory(out, overwrite=True) as scratch:
        made = export(make_scales(), checkpoint, "vllm")
        write_checkpoint(made, checkpoint, scratch, weights=weights, readme="# Ours\n")
    return out


def tensors(path):
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def index_of(directory):
    return json.loads((directory / "model.safetensors.index.json").read_text())


def snapshot(directory):
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return [(path, path.stat().st_mtime_ns, path.read_bytes()) for path in files]


def test_an_output_links_weights_and_leaves_the_source_as_it_is(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint({"author": "Gödel"})
    source = checkpoint.path
    (source / "README.md").write_text("---\nlicense: mit\n---\n# The model\n")
    for name in ("templates/tool.jinja", ".cache/x", "pytorch_model.bin", "consolidated.safetensors"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("x")
    before, umask = snapshot(source), os.umask(0o022)
    try:
        out = write(checkpoint, tmp_path / "out")
    finally:
        os.umask(umask)
    assert snapshot(source) == before
    assert (out / RENAMED).samefile(source / "model.safetensors")
    assert '"author": "Gödel"' in (out / "config.json").read_text()
    ours = {RENAMED, SCALES_SHARD, "model.safetensors.index.json"}  # small files travel, other weights do not
    ours |= {"fp8kv_source/README.md", "fp8kv_source/config.json"}
    theirs = {"README.md", "config.json", "templates/tool.jinja", "tokenizer.json"}
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == ours | theirs
    # a server running as another user can read the scales, and transformers wants "pt"
    assert (out / SCALES_SHARD).stat().st_mode & 0o777 == 0o644
    assert tensors(out / SCALES_SHARD)[1] == {"format": "pt"}
    card = (out / "README.md").read_text()  # the model's card keeps its front matter first and its text last
    assert card.startswith("---\nlicense: mit\n---\n\n# Ours\n\nBeside engines: ")
    line = "---\n\n*The README of the model that this was made from, about that model:*"
    assert card.endswith(f"installed.\n\n{line}\n\n# The model\n")


def test_the_shards_of_a_sharded_source_keep_their_names(make_checkpoint, tmp_path):
    source = make_checkpoint().path
    (source / "model.safetensors").rename(source / "part.safetensors")
    names = [f"model.layers.{i}.self_attn.k_proj.weight" for i in range(2)]
    index = {"weight_map": dict.fromkeys(names, "part.safetensors"), "metadata": {"total_size": 32}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    out = write(open_model_directory(source), tmp_path / "out")
    assert (out / "part.safetensors").samefile(source / "part.safetensors")
    written = index_of(out)
    assert set(written["weight_map"].values()) == {"part.safetensors", SCALES_SHARD}
    assert written["metadata"]["total_size"] == 32 + 4 * 4


def test_weights_are_copied_or_left_out_as_asked(checkpoint, tmp_path):
    source = checkpoint.path / "model.safetensors"
    copied = write(checkpoint, tmp_path / "copy", weights="copy") / RENAMED
    assert not copied.samefile(source)
    assert copied.read_bytes() == source.read_bytes()
    out = write(checkpoint, tmp_path / "none", weights="none")
    assert [path.name for path in out.glob("*.safetensors")] == [SCALES_SHARD]
    assert set(index_of(out)["weight_map"].values()) == {"model.safetensors", SCALES_SHARD}


def test_scales_of_an_earlier_calibration_are_replaced(make_checkpoint, tmp_path):
    stale = {f"{OLD}.k_scale": torch.ones(1), f"{OLD}.k_proj.output_scale": torch.ones(1)}
    checkpoint = make_checkpoint(extra=stale | {f"{OLD}.k_proj.weight_scale": torch.ones(1)})
    file = checkpoint.path / "model.safetensors"
    source, _ = tensors(file)
    save_file(source, file, metadata={"format": "pt"})
    checkpoint, before = open_model_directory(checkpoint.path), snapshot(checkpoint.path)
    out = write(checkpoint, tmp_path / "out")
    kept, metadata = tensors(out / RENAMED)
    assert kept.keys() == source.keys() - stale.keys()
    assert all(torch.equal(tensor, source[name]) for name, tensor in kept.items())
    assert metadata == {"format": "pt"}
    index = index_of(out)["weight_map"]
    assert index[f"{OLD}.k_scale"] == SCALES_SHARD
    assert f"{OLD}.k_proj.output_scale" not in index
    assert snapshot(checkpoint.path) == before


def test_where_an_output_may_go(checkpoint, tmp_path):
    out, source = tmp_path / "out", checkpoint.path

    def refused(place, overwrite, message):
        with pytest.raises(InputError, match=message):
            check_output(place, source, overwrite=overwrite)

    refused(tmp_path / "a\nb", False, "has a control character, which no printed")
    for name in (out, tmp_path / "\u5168\u3000\u89d2"):  # a wide space is not a control character
        check_output(name, source, overwrite=False)
    out.mkdir()
    check_output(out, source, overwrite=False)
    (out / "thesis.txt").write_text("x")
    for overwrite in (True, False):
        refused(out, overwrite, "bears no mark of fp8kv, and is left alone; choose another -o")
    (out / "vllm").mkdir()
    (out / "vllm" / CALIBRATION_FILE).write_text("{}")
    refused(out, True, "bears no mark of fp8kv")  # a directory of the user's, with an output of one format
    (out / "thesis.txt").unlink()
    (out / "tgi").mkdir()
    refused(out, True, "bears no mark of fp8kv")
    (out / "tgi" / CALIBRATION_FILE).write_text("{}")
    (out / ".DS_Store").touch()
    check_output(out, source, overwrite=True)
    (out / "tgi").rename(out / "run1")
    refused(out, True, "bears no mark of fp8kv")
    (out / CALIBRATION_FILE).write_text("{}")
    refused(out, False, "exists; add --overwrite")
    check_output(out, source, overwrite=True)
    for near in (source, source / "sub", tmp_path):
        refused(near, True, "would mix with the model")
    refused(tmp_path / ("x" * 300), False, "File name too long; choose another -o")


@pytest.mark.parametrize(("name", "strategy", "targets"), CASES)
def test_output_matches_its_golden_file(name, strategy, targets, checkpoint, tmp_path, request):
    made = export(make_scales(strategy, q=targets == "qkv"), checkpoint, name, tp_size=2)
    out = tmp_path / "out"
    out.mkdir()
    if FORMATS[name].with_weights:
        write_checkpoint(made, checkpoint, out, weights="link", readme="")
    else:
        write_documents(made, out)
    golden, found = GOLDEN / f"{name}-{strategy}-{targets}.json", describe(out)
    if request.config.getoption("--update-golden"):
        golden.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(golden.read_text())


NEEDING = "transformers opens this directory only where `compressed-tensors` is installed"


def test_text_of_others_cannot_begin_a_line_or_steer_a_terminal_and_its_markup_is_quoted_in_a_pack():
    card = format_card("m\n# Mine\x1b[2J", "vllm", Path("out"), "tensor", warnings=["a\n# b"])
    first, *lines = card.splitlines()
    assert first.startswith("#")
    assert not [line for line in lines if line.startswith("#")]
    assert "\x1b" not in card
    assert lines[-1] == "- a\N{REPLACEMENT CHARACTER}# b"
    facts = {"facts": {"model": "a|b"}, "evaluation": None, "layers": [], "warnings": ["[x](y)"]}
    card = render_card("pack", model="*m*", **facts)
    for quoted in (r"# FP8 KV-cache scales for \*m\*", r"| model | a\|b |", r"- \[x\](y)"):
        assert quoted in card
    with pytest.raises(jinja2.UndefinedError):
        render_card("bake", model="a card without its facts")


def test_the_table_of_formats_is_fresh():
    assert formats_table.PAGE.read_text() == formats_table.page(), "make pages"


def opens(directory):
    try:
        AutoModelForCausalLM.from_pretrained(directory)
    except ImportError as error:
        return "compressed-tensors" not in str(error)
    return True


# whatever needs it cannot be seen where it is
@pytest.mark.skipif(find_spec("compressed_tensors") is not None, reason="compressed-tensors is installed")
def test_the_card_says_what_transformers_needs_to_open_an_output(tiny_directory, tmp_path):
    formats = [name for name, each in FORMATS.items() if each.with_weights]
    flags = [flag for name in formats for flag in ("--format", name)]
    assert calibrate(tiny_directory, "-o", tmp_path / "out", *flags).exit_code == 0
    source = tmp_path / "out" / "vllm"
    for name in {*FORMATS} - {"fp8kv"}:
        ran("convert", source, "--to", name, "-o", tmp_path / f"converted-{name}")
    for name in formats:
        for directory in (tmp_path / "out" / name, tmp_path / f"converted-{name}"):
            says = NEEDING in (directory / "README.md").read_text()
            assert says == (not opens(directory)), directory
    assert NEEDING not in (tmp_path / "converted-json" / "README.md").read_text()
    ran("strip", source, "-o", tmp_path / "stripped")
    assert opens(tmp_path / "stripped")


def expected(name, strategy, reduce):
    """The strategy of what is written; nothing where it is refused."""
    if name == "fp8kv":  # statistics: the strategy is chosen when they are read
        return None if reduce == "max" and strategy != "tensor" else strategy
    if reduce == "max" or strategy == "tensor":
        return "tensor"
    return strategy if strategy in FORMATS[name].strategies else None


def test_every_format_does_with_every_strategy_what_is_asked_or_refuses(checkpoint):
    for name, strategy, reduce in product(FORMATS, ("tensor", "attn_head", "channel"), ("none", "max")):
        scales, kind = make_scales(strategy), expected(name, strategy, reduce)
        if kind is None:
            with pytest.raises(UnsupportedExportError):
                export(scales, checkpoint, name, reduce=reduce)
            continue
        made = export(scales, checkpoint, name, reduce=reduce)
        wanted = export(scales if kind == strategy else scales.reduce_max(), checkpoint, name)
        assert (made.config, made.documents) == (wanted.config, wanted.documents), (name, strategy)
        found, tensors = ({n: t.tolist() for n, t in each.tensors.items()} for each in (made, wanted))
        assert found == tensors, (name, strategy)


def test_the_card_and_the_command_that_serves_it_are_of_what_is_written(model, tmp_path):
    source, reduced, converted = (tmp_path / name for name in ("source", "reduced", "converted"))
    calibrate(model, "--strategy", "attn_head", "-o", source)
    assert "--attention-backend" in (source / "README.md").read_text()
    done = succeeded(calibrate(model, "--strategy", "attn_head", "-o", reduced, "--reduce", "max"))
    assert "--attention-backend" not in " ".join(done.stdout.split())
    calibrate(model, "-o", tmp_path / "tensor")  # the same scales, of which the same is said
    reports = [json.loads((out / CALIBRATION_FILE).read_text()) for out in (reduced, tmp_path / "tensor")]
    for key in ("layers", "clip_chance", "expected"):
        assert reports[0][key] == reports[1][key]
    ran("convert", source, "--to", "vllm", "--reduce", "max", "-o", converted)
    for out in (reduced, converted):
        card = (out / "README.md").read_text()
        assert "--attention-backend" not in card
        assert "strategy `tensor`" in card
        ran("verify", out, "--engine", "sglang")
    # apply reduces as the calibration did, unless a strategy is named
    for extra, count in (((), 1), (("--strategy", "attn_head"), 2)):
        out = tmp_path / f"out-{count}"
        ran("apply", reduced, model, "-o", out, *extra)
        assert {len(layer.k) for layer in read_scales(out).layers} == {count}


FLAG = "--model-impl transformers"
WAY_OUT = "fp8kv bake after fp8kv calibrate --format fp8kv, or --to"
PLAIN, INNER = "self_attn.k_scale", "self_attn.attn.k_scale"


def save(family, directory):
    make = tiny_vision_language_model if family == "llama4" else tiny_model
    return save_model(make(family), directory / family)


def holds(output, name):
    with safe_open(output / "model-fp8kv-scales.safetensors", "pt") as file:
        return any(key.endswith(f".0.{name}") for key in file.keys())  # noqa: SIM118


def test_an_output_loads_in_the_engine_of_its_format_or_it_is_said_before_measuring(tmp_path, monkeypatch):
    for family, engine, name in (
        ("llama", "sglang", PLAIN),
        ("qwen2", "sglang", INNER),
        ("qwen3_moe", "vllm", PLAIN),
        ("gpt2", "sglang", "attn.attn.k_scale"),
        ("llama4", "vllm", PLAIN),
    ):
        out = tmp_path / f"{family}-out"
        succeeded(calibrate(save(family, tmp_path), "-o", out, "--format", engine, "--quiet"))
        assert holds(out, name)
        ran("verify", out, "--engine", engine)
    monkeypatch.setattr("calib.capture.resume.calibrate", lambda *_, **__: pytest.fail("it measured"))
    deepseek = save_model(tiny_model("deepseek_v3", **LATENT["deepseek_v3"]), tmp_path / "deepseek")
    way_out = "(no place), so it would compute with 1.0. Use --format vllm for vLLM, or --format fp8kv"
    for source, name, *said in (
        (save("qwen3", tmp_path), "sglang", "SGLang's class Qwen3ForCausalLM loads no KV scales", way_out),
        (save("gpt_oss", tmp_path), "sglang", "SGLang's class GptOssForCausalLM loads no KV scales", way_out),
        (deepseek, "vllm", "--format vllm:", "fp8kv bake after fp8kv calibrate --format fp8kv"),
    ):
        one_line_error(calibrate(source, "-o", tmp_path / "out", "--format", name), *said)
        assert not (tmp_path / "out").exists()


def test_a_class_that_was_never_run_gets_the_usual_name_and_a_warning(tmp_path):
    source, out = save("llama", tmp_path), tmp_path / "out"
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["OwnForCausalLM"]}))
    done = succeeded(calibrate(source, "-o", out, "--format", "sglang"))
    printed = " ".join((done.stdout + done.stderr).split())
    assert "whether SGLang loads these scales is not known for OwnForCausalLM" in printed
    assert holds(out, PLAIN)
    assert fp8kv("verify", out, "--engine", "sglang").exit_code == 1
    quiet = calibrate(source, "-o", out, "--format", "sglang", "--quiet", "--overwrite")
    assert quiet.stdout == ""
    assert quiet.stderr.startswith("warning: whether SGLang loads these scales is not known for")
    assert calibrate(source, "-o", out, "--format", "sglang", "--json", "--overwrite").stderr == ""


def test_an_output_of_latents_is_served_as_its_card_says_and_as_verify_says(tmp_path):
    deepseek = save_model(tiny_model("deepseek_v3", **LATENT["deepseek_v3"]), tmp_path / "model")
    out, again = tmp_path / "out", tmp_path / "again"
    done = succeeded(calibrate(deepseek, "-o", out, "--format", "modelopt"))
    command, card = f"vllm serve {out} --kv-cache-dtype fp8 {FLAG}", (out / "README.md").read_text()
    for said, whom in ((" ".join(done.stdout.split()), "serve with vLLM:"), (card, "for vLLM; strategy")):
        assert command in said
        assert whom in said
    (engine,) = json_of("verify", out, "--engine", "vllm")["engines"]
    assert engine["flag"] == FLAG
    # vLLM passes them through bfloat16
    layers = json.loads((out / "fp8kv_calibration.json").read_text())["layers"]
    expected = [torch.tensor(layer["k_scale"]).bfloat16().item() for layer in layers]
    assert [o["values"][0] for o in engine["layers"] if o["letter"] == "k"] == expected
    assert fp8kv("verify", out, "--engine", "sglang").exit_code == 1
    # convert writes them for no other engine
    one_line_error(fp8kv("convert", out, "--to", "vllm", "-o", again), "--to vllm:", f"Use {WAY_OUT}")
    ran("convert", out, "--to", "modelopt", "-o", again)
    assert f"vllm serve {again} --kv-cache-dtype fp8 {FLAG}\n" in (again / "README.md").read_text()
    ran("verify", again, "--engine", "vllm")


def replaced(file):
    """As a download does it: another file under the same name."""
    copy = file.with_name("copy")
    shutil.copy2(file, copy)
    copy.rename(file)


def rewritten(file):
    """As an editor does it: the same file, at another time."""
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(1, 1))


@pytest.fixture
def after(monkeypatch):
    """Change the weights of a directory once a function has returned."""

    def arrange(module, name, directory, change=replaced):
        original = getattr(module, name)

        def changing(*arguments, **options):
            found = original(*arguments, **options)
            for file in [*directory.glob("model-0*.safetensors"), *directory.glob("model.safetensors")]:
                change(file)
            monkeypatch.setattr(module, name, original)
            return found

        monkeypatch.setattr(module, name, changing)

    return arrange


@pytest.mark.parametrize(
    ("module", "name", "change", "command"),
    [
        (job, "_prepare", replaced, "calibrate MODEL"),
        (job, "_prepare", rewritten, "calibrate MODEL"),
        (job, "_prepare", Path.unlink, "calibrate MODEL"),
        (job, "_prepare", replaced, "calibrate MODEL --format json"),  # without weights in the output
        (job, "calibrate_layerwise", replaced, "calibrate MODEL --offload layerwise"),
        (resume, "calibrate", replaced, "calibrate MODEL"),
        (output, "save_stats", replaced, "calibrate MODEL"),  # at the last moment
        (pipeline, "write_weights", replaced, "stress MODEL"),
        (convert, "existing_scales", replaced, "convert OLD --to tgi"),
        (convert, "existing_scales", replaced, "convert OLD --to json"),
        (strip, "_write_weights", replaced, "strip OLD"),
        (repair, "open_calibration", replaced, "repair OLD --stats OLD"),
        (merge, "_check_counts", replaced, "merge OLD OTHER"),
    ],
)
def test_nothing_is_written(after, module, name, change, command, tiny_directory, tmp_path):
    places = {"MODEL": tiny_directory, "OLD": tmp_path / "old", "OTHER": tmp_path / "other"}
    for seed, name_of_output in enumerate(places.keys() & {*command.split()} - {"MODEL"}):
        calibrate(tiny_directory, "-o", places[name_of_output], "--set", f"data.seed={seed}")
    after(module, name, places["OLD"] if "OLD" in command and module is not merge else tiny_directory, change)
    small = SMALL if command.startswith("calibrate") else ()
    done = fp8kv(*(places.get(word, word) for word in command.split()), "-o", tmp_path / "out", *small)
    one_line_error(done, "model", "has changed since", "nothing was written")
    assert not [*tmp_path.glob("out"), *tmp_path.glob(".*partial")]


def test_nothing_is_written_in_place(after, tiny_directory, tmp_path):
    after(output, "write_checkpoint", tiny_directory)
    before = sorted(path.name for path in tiny_directory.iterdir())
    one_line_error(calibrate(tiny_directory, "--in-place"), "has changed since", "nothing was written")
    assert sorted(path.name for path in tiny_directory.iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == [tiny_directory.name]


def test_other_links_to_the_same_weights_are_no_change(after, tiny_directory, tmp_path):
    after(job, "_prepare", tiny_directory, lambda file: os.link(file, tmp_path / "another"))
    succeeded(calibrate(tiny_directory, "-o", tmp_path / "out"))
