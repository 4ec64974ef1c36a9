"""lm-eval on the FP8 cache, against lm-eval on a model whose K and V are rounded plainly."""

import copy
import json
import math
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import lm_eval
import pytest
import yaml
from command_line import fp8kv, one_line_error
from fake_quant import fake_quantized, scales_for
from families import FAMILIES, save_model, tiny_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from calib.errors import InputError
from calib.evaluate import inputs, run
from calib.evaluate.page.tables import task_table
from calib.evaluate.report import Report, Suite, TaskFigure
from calib.evaluate.tasks import find_tasks, run_tasks, task_variants
from calib.evaluate.variants import Setup, Variant

DOCUMENTS = 8


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_model(tiny_model("mistral", **FAMILIES["mistral"]), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def model(directory):
    return AutoModelForCausalLM.from_pretrained(directory).eval()


@pytest.fixture(scope="module")
def tokenizer(directory):
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def task_files(tmp_path_factory, model, tokenizer):
    """A directory of three tasks, whose right answers are the model's own on its 16-bit cache."""
    directory = tmp_path_factory.mktemp("tasks")
    rng = random.Random(0)

    def words(low, high):
        return " ".join(f"w{rng.randint(3, 127)}" for _ in range(rng.randint(low, high)))

    rows = []
    for _ in range(DOCUMENTS):
        question = words(4, 20)
        ids = tokenizer(question, return_tensors="pt").input_ids
        text = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
        answer = tokenizer.decode(text, skip_special_tokens=True)
        choices = [words(1, 3) for _ in range(4)]
        rows.append({"q": question, "choices": choices, "gold": rng.randint(0, 3), "a": answer})
    (directory / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(directory / "rows.jsonl")},
            "cache_dir": str(directory / "cache"),
        },
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
    written = {
        "choice": {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{gold}}",
            "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "brier_score")],
            "num_fewshot": 2,
            "fewshot_split": "test",
        },
        "text": {
            "output_type": "generate_until",
            "doc_to_target": "{{a}}",
            "generation_kwargs": {"max_gen_toks": 5, "until": ["</s>"]},
            "metric_list": [{"metric": "exact_match"}],
        },
        "likelihood": {
            "output_type": "loglikelihood",
            "doc_to_target": " {{choices[0]}}",  # lm-eval puts no space before it
            "metric_list": [{"metric": "perplexity"}],
        },
    }
    for name, config in written.items():
        text = yaml.safe_dump({"task": f"tiny_{name}", **shared, **config})
        (directory / f"{name}.yaml").write_text(text)
    return directory


@pytest.fixture(scope="module")
def scales(model):
    """Scales so small that what saturates changes what is written."""
    scales = scales_for(model)
    layers = {n: replace(s, k=s.k / 16, v=s.v / 16) for n, s in scales.layers.items()}
    return replace(scales, layers=layers)


def plain_harness(model, tokenizer, task_files, batch_size):
    """Every metric of every task, as lm-eval itself gives it."""
    done = lm_eval.simple_evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
        tasks=[str(file) for file in sorted(task_files.glob("*.yaml"))],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=1000,
    )
    return {
        task: {key: math.nan if value == "N/A" else value for key, value in row.items() if "," in key}
        for task, row in done["results"].items()
    }


def number(value):
    return math.nan if value in ("N/A", None) else value


def in_harness_words(tasks, variant):
    """Our rows of one cache, with the keys of lm-eval."""
    return {
        task: {
            f"{metric}{suffix},none": number(figure[key])
            for metric, figure in caches[variant].items()
            for key, suffix in (("value", ""), ("stderr", "_stderr"))
        }
        for task, caches in tasks.items()
    }


@pytest.fixture(scope="module")
def tasks(model, tokenizer, task_files, scales):
    found = find_tasks([str(task_files)])
    return run_tasks(Setup(model, tokenizer), found, [Variant("mine", "", "fp8", scales)])["tasks"]


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for task, row in expected.items():
        # in a batch the products of matrices are added in another order
        assert found[task] == pytest.approx(row, rel=1e-4, nan_ok=True), task


def test_the_reference_is_lm_eval_on_the_model(tasks, model, tokenizer, task_files):
    expected = plain_harness(model, tokenizer, task_files, batch_size=1)
    assert_same(in_harness_words(tasks, "reference"), expected)
    assert expected["tiny_text"]["exact_match,none"] == 1.0


def test_the_fp8_cache_is_lm_eval_on_a_model_with_rounded_keys_and_values(
    tasks, model, tokenizer, task_files, scales
):
    with fake_quantized(model, scales):
        expected = plain_harness(model, tokenizer, task_files, batch_size=1)
    assert_same(in_harness_words(tasks, "mine"), expected)
    reference = in_harness_words(tasks, "reference")
    for task, metric in (
        ("tiny_choice", "brier_score,none"),
        ("tiny_text", "exact_match,none"),
        ("tiny_likelihood", "perplexity,none"),
    ):
        assert expected[task][metric] != reference[task][metric]


def test_the_kernels_give_the_same_figures(model, tokenizer, task_files, scales):
    found = find_tasks([str(task_files / f"{name}.yaml") for name in ("likelihood", "text")], 2)
    mine = [Variant("mine", "", "fp8", scales)]
    made = [
        run_tasks(Setup(model, tokenizer, backend), found, mine)["tasks"] for backend in ("torch", "triton")
    ]
    plain, kernels = (in_harness_words(tasks, "mine") for tasks in made)
    assert_same(kernels, plain)


def test_the_limit_and_the_version_are_kept(model, tokenizer, task_files):
    found = find_tasks([str(task_files / "text.yaml")], limit=2)
    made = run_tasks(Setup(model, tokenizer), found, [])
    assert made["harness"] == {"name": "lm-eval", "version": lm_eval.__version__, "limit": 2}
    assert [task.instances[-1].doc_id for task in found.loaded["tasks"].values()] == [1]


def test_a_task_says_which_caches_it_runs_with(scales):
    variants = [
        Variant("bf16", "", "control"),
        *(Variant(name, "", "fp8", scales) for name in ("none", "tensor", "attn_head")),
        Variant("k only", "", "fp8", scales, "k"),
    ]

    mine = Variant("mine", "", "given", scales)

    def names(variants, chosen):
        return [variant.name for variant in task_variants(variants, chosen)]

    assert names(variants, None) == ["none", "attn_head"]
    assert names([*variants, mine], None) == ["mine"]
    assert names([*variants, mine], ["tensor"]) == ["none", "tensor", "attn_head", "mine"]


def test_the_tokenizer_the_model_and_the_environment_stay_as_they_are(
    model, tokenizer, task_files, monkeypatch
):
    monkeypatch.delenv("DISABLE_MULTIPROC", raising=False)
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    config = copy.deepcopy(model.config)
    run_tasks(Setup(model, bare), find_tasks([str(task_files / "text.yaml")], limit=1), [])
    assert bare.pad_token is None
    assert model.config == config
    assert "DISABLE_MULTIPROC" not in os.environ


GOOD = "task: x\noutput_type: multiple_choice\ndataset_path: {path}\ntest_split: test\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hello: 1", "is not a task of lm-eval: it has no `task:` name"),
        ("- task", "is not a task of lm-eval"),
        ("", "is not a task of lm-eval"),
        ("task: [x", "cannot read"),
        ("group: g\ntask: [a, b]", "is a group, not a task; give the directory"),
        ("task: x\nmistake: 1", "unexpected keyword argument 'mistake'"),
        ("task: x\ndoc_to_text: !function gone.function", "Cannot import module 'gone'"),
        (GOOD.format(path="json") + "dataset_kwargs: {data_files: {test: gone.json}}", "gone.json"),
        (GOOD.format(path="org/gone"), "the dataset of task .* cannot be reached .* YAML file"),
    ],
)
def test_files_that_are_no_tasks(text, problem, tmp_path):
    file = tmp_path / "task.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=problem) as caught:
        find_tasks([str(file)])
    assert "\n" not in str(caught.value)


def test_paths_that_hold_no_tasks(tmp_path):
    with pytest.raises(InputError, match="cannot read --tasks './gone.yaml'"):
        find_tasks(["./gone.yaml"])
    with pytest.raises(InputError, match="holds no task"):
        find_tasks([str(tmp_path)])


def test_a_task_given_twice(task_files, tmp_path):
    copied = tmp_path / "copy.yaml"
    copied.write_text((task_files / "text.yaml").read_text())
    with pytest.raises(InputError, match="another of --tasks holds 'tiny_text' too"):
        find_tasks([str(task_files), str(copied)])
    same = str(task_files / "text.yaml")
    assert list(find_tasks([same, same]).loaded["tasks"]) == ["tiny_text"]


def test_tasks_that_a_language_model_cannot_be_given(task_files, tmp_path):
    text = (task_files / "text.yaml").read_text()
    for key, problem in (("unsafe_code: true", "runs code"), ("doc_to_image: [q]", "images")):
        (tmp_path / "task.yaml").write_text(f"{text}{key}\n")
        with pytest.raises(InputError, match=problem):
            find_tasks([str(tmp_path / "task.yaml")])


def test_a_task_that_writes_more_than_the_model_has_positions(model, tokenizer, task_files, tmp_path):
    text = (task_files / "text.yaml").read_text()
    (tmp_path / "long.yaml").write_text(text.replace("max_gen_toks: 5", "max_gen_toks: 256"))
    found = find_tasks([str(tmp_path / "long.yaml")])
    with pytest.raises(InputError, match="cache 'reference': .* maximum sequence length"):
        run_tasks(Setup(model, tokenizer), found, [])


def test_names_are_those_of_lm_eval():
    with pytest.raises(InputError, match="no task 'helaswag'; did you mean .*hellaswag"):
        find_tasks(["helaswag"])


def test_without_lm_eval(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(InputError, match=r"pip install 'fp8kv\[eval\]'"):
        find_tasks(["hellaswag"])


@pytest.fixture
def small_suite(monkeypatch):
    monkeypatch.setitem(inputs.SUITES, "quick", Suite(4, 2, 16, 1, 2, (), (), 1))


def eval_(*arguments):
    flags = ("--device", "cpu", "--dataset", "random", "--variants", "tensor")
    return fp8kv("eval", *arguments, *flags)


@pytest.mark.usefixtures("small_suite")
def test_the_report_has_the_tasks(directory, task_files, tmp_path):
    likelihood, text = (str(task_files / f"{name}.yaml") for name in ("likelihood", "text"))
    flags = ("--tasks", f"{likelihood},{text}", "--task-limit", 3, "-o", tmp_path / "report")
    done = eval_(directory, *flags, "--json")
    assert done.exit_code == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["harness"]["limit"] == 3
    assert list(printed["tasks"]) == ["tiny_likelihood", "tiny_text"]
    assert list(printed["tasks"]["tiny_text"]) == ["reference", "tensor"]
    assert printed["tasks"]["tiny_text"]["reference"]["exact_match"]["value"] == 1.0
    assert json.loads((tmp_path / "report/report.json").read_text())["tasks"] == printed["tasks"]
    assert "| tiny\\_text | exact\\_match | 1 ± 0 |" in (tmp_path / "report/report.md").read_text()
    compared = fp8kv("compare", tmp_path / "report", tmp_path / "report/report.json", "--json")
    assert json.loads(compared.stdout)["warnings"] == []


@pytest.mark.usefixtures("small_suite")
def test_the_command_shows_the_tasks(directory, task_files):
    done = eval_(directory, "--tasks", task_files / "text.yaml", "--task-limit", 2)
    assert done.exit_code == 0, done.stderr
    assert f"lm-eval {lm_eval.__version__}, --task-limit 2" in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if "exact_match" in line)
    assert line.split("│")[1:4] == [" tiny_text ", " exact_match ", "     1 ± 0 "]


def test_a_figure_without_a_number():
    none = TaskFigure(value=None, stderr=None)
    rows = task_table(Report.model_construct(tasks={"t": {"reference": {"m": none}}})).lines
    assert rows == [("t", "m", "n/a")]


def test_mistakes_are_told_before_the_model_is_loaded(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "load_model", None)
    (tmp_path / "none.yaml").write_text("hello: 1")
    one_line_error(eval_(directory, "--tasks", tmp_path / "none.yaml"), "is not a task of lm-eval")
    one_line_error(eval_(directory, "--tasks", "x", "--task-limit", 0), "evaluation.task_limit", "equal to 1")


def test_nothing_of_lm_eval_is_shown(directory, task_files):
    command = ("eval", str(directory), "--device", "cpu", "--dataset", "random", "--json")
    small = ("--samples", "2", "--seq-len", "16", "--variants", "tensor", "--task-limit", "1")
    done = subprocess.run(
        [sys.executable, "-m", "calib", *command, *small, "--tasks", str(task_files / "text.yaml")],
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout)["tasks"]
    assert done.stderr == ""


def test_the_example_of_the_documentation(model, tokenizer, tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs/evaluation.md").read_text()
    (example,) = re.findall(r"```yaml\n(# capitals.yaml.*?)```", page, re.DOTALL)
    (row,) = re.findall(r"capitals.jsonl: ({.*})", example)
    monkeypatch.chdir(tmp_path)
    Path("capitals.yaml").write_text(example)
    Path("capitals.jsonl").write_text(row)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    made = run_tasks(Setup(model, tokenizer), find_tasks(["./capitals.yaml"]), [])
    assert set(made["tasks"]["capitals"]["reference"]) == {"acc", "acc_norm"}


def test_a_token_that_the_embedding_has_no_row_for(model, tokenizer, task_files, tmp_path):
    own = copy.deepcopy(tokenizer)
    own.add_tokens(["w128"])
    config = yaml.safe_load((task_files / "likelihood.yaml").read_text())
    setup = Setup(model, own)
    assert "tasks" in run_tasks(setup, find_tasks([str(task_files / "likelihood.yaml")]), [])
    config["doc_to_text"] = "{{q}} w128"
    (tmp_path / "unknown.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(InputError, match="has 129 tokens and the model's embedding 128 rows"):
        run_tasks(setup, find_tasks([str(tmp_path / "unknown.yaml")]), [])
    assert not model.get_input_embeddings()._forward_pre_hooks
