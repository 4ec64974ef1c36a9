"""lm-eval on the FP8 cache, against lm-eval on a model whose K and V are rounded plainly."""

import copy
import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lm_eval
import pytest
import yaml
from command_line import fp8kv, one_line_error, ran
from fake_quant import fake_quantized, scales_for
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from calib.errors import InputError
from calib.evaluate import inputs, run
from calib.evaluate.page.page import render_html
from calib.evaluate.page.tables import task_table
from calib.evaluate.report import Report, Suite, TaskFigure
from calib.evaluate.resume import SavedResults
from calib.evaluate.tasks import Tasks, digest_tasks, find_tasks, run_tasks, task_variants
from calib.evaluate.variants import Setup, Variant

pytestmark = pytest.mark.xdist_group("evaluate")


@pytest.fixture(scope="module")
def setup(small_directory):
    model = AutoModelForCausalLM.from_pretrained(small_directory).eval()
    return Setup(model, AutoTokenizer.from_pretrained(small_directory))


TASKS = """
choice: {output_type: multiple_choice, doc_to_choice: "{{choices}}", doc_to_target: "{{gold}}",
  num_fewshot: 2, fewshot_split: test,
  metric_list: [{metric: acc}, {metric: acc_norm}, {metric: brier_score}]}
text: {output_type: generate_until, doc_to_target: "{{a}}", metric_list: [{metric: exact_match}],
  generation_kwargs: {max_gen_toks: 5, until: ["</s>"]}}
likelihood: {output_type: loglikelihood, metric_list: [{metric: perplexity}],
  doc_to_target: " {{choices[0]}}"} # lm-eval puts no space before it
"""


@pytest.fixture(scope="module")
def task_files(tmp_path_factory, setup):
    """A directory of three tasks, whose right answers are the model's own on its 16-bit cache."""
    directory, rng, rows = tmp_path_factory.mktemp("tasks"), random.Random(0), []

    def words(low, high):
        return " ".join(f"w{rng.randint(3, 127)}" for _ in range(rng.randint(low, high)))

    for _ in range(5):
        question, choices = words(4, 20), [words(1, 3) for _ in range(4)]
        ids = setup.tokenizer(question, return_tensors="pt").input_ids
        text = setup.model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
        answer = setup.tokenizer.decode(text, skip_special_tokens=True)
        rows.append({"q": question, "choices": choices, "gold": rng.randint(0, 3), "a": answer})
    (directory / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"data_files": {"test": str(directory / "rows.jsonl")}, "cache_dir": str(directory / "cache")}
    shared = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test", "doc_to_text": "{{q}}"}
    for name, config in yaml.safe_load(TASKS).items():
        text = yaml.safe_dump({"task": f"tiny_{name}", **shared, **config})
        (directory / f"{name}.yaml").write_text(text)
    return directory


def number(value):
    return math.nan if value in ("N/A", None) else value


def test_figures_are_those_of_lm_eval_on_a_model_with_rounded_keys_and_values(setup, task_files):
    def plain_harness():
        """Every metric of every task, as lm-eval itself gives it."""
        results = lm_eval.simple_evaluate(
            HFLM(pretrained=setup.model, tokenizer=setup.tokenizer, batch_size=1),
            tasks=[str(file) for file in sorted(task_files.glob("*.yaml"))],
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=1000,
        )["results"]
        figures = ((task, *pair) for task, row in results.items() for pair in row.items())
        return {f"{task} {key}": number(value) for task, key, value in figures if "," in key}

    scales = scales_for(setup.model)  # scales so small that what saturates changes what is written
    layers = {n: replace(s, k=s.k / 16, v=s.v / 16) for n, s in scales.layers.items()}
    scales = replace(scales, layers=layers)
    tasks = run_tasks(setup, find_tasks([str(task_files)]), [Variant("mine", "", "fp8", scales)])["tasks"]
    reference = plain_harness()
    with fake_quantized(setup.model, scales):
        rounded = plain_harness()
    for variant, expected in (("reference", reference), ("mine", rounded)):
        found = {
            f"{task} {metric}{suffix},none": number(figure[key])
            for task, caches in tasks.items()
            for metric, figure in caches[variant].items()
            for key, suffix in (("value", ""), ("stderr", "_stderr"))
        }
        # in a batch the products of matrices are added in another order
        assert found == pytest.approx(expected, rel=1e-4, nan_ok=True), variant
    assert reference["tiny_text exact_match,none"] == 1.0
    for figure in ("choice brier_score", "text exact_match", "likelihood perplexity"):
        assert rounded[f"tiny_{figure},none"] != reference[f"tiny_{figure},none"]


def test_a_task_says_which_caches_it_runs_with(setup):
    scales = scales_for(setup.model)
    variants = [Variant(name, "", "fp8", scales) for name in ("none", "tensor", "attn_head")]
    variants += [Variant("bf16", "", "control"), Variant("k only", "", "fp8", scales, "k")]
    mine = Variant("mine", "", "given", scales)
    for measured, chosen, names in (
        (variants, None, ["none", "attn_head"]),
        ([*variants, mine], None, ["mine"]),
        ([*variants, mine], ["tensor"], ["none", "tensor", "attn_head", "mine"]),
    ):
        assert [variant.name for variant in task_variants(measured, chosen)] == names


def test_the_tokenizer_the_model_and_the_environment_stay_as_they_are(setup, task_files, monkeypatch):
    monkeypatch.delenv("DISABLE_MULTIPROC", raising=False)
    bare, config = copy.deepcopy(setup.tokenizer), copy.deepcopy(setup.model.config)
    bare.pad_token = None
    tasks = find_tasks([str(task_files / "text.yaml")], limit=2)
    made = run_tasks(replace(setup, tokenizer=bare), tasks, [])
    assert made["harness"] == {"name": "lm-eval", "version": lm_eval.__version__, "limit": 2}
    assert [task.instances[-1].doc_id for task in tasks.loaded["tasks"].values()] == [1]
    assert bare.pad_token is None
    assert setup.model.config == config
    assert "DISABLE_MULTIPROC" not in os.environ


def test_figures_of_an_earlier_run_are_taken_and_other_questions_or_settings_are_told(
    setup, task_files, tmp_path, monkeypatch
):
    file = task_files / "choice.yaml"
    tasks = find_tasks([str(file)], limit=2)
    first, again = SavedResults(tmp_path / "saved"), SavedResults(tmp_path / "saved", resume=True)
    first.open({}, ())
    figures = run_tasks(replace(setup, saved=first), tasks, [])
    again.open({}, ())
    monkeypatch.setattr(lm_eval, "evaluate", lambda *_, **__: pytest.fail("it was asked again"))
    assert run_tasks(replace(setup, saved=again), tasks, []) == figures
    assert digest_tasks(find_tasks([str(file)])) == digest_tasks(tasks)
    rows, other, examples = (tmp_path / name for name in ("rows.jsonl", "choice.yaml", "examples.jsonl"))
    text = file.read_text().replace(str(task_files / "rows.jsonl"), str(rows))
    text = text.replace("fewshot_split: test", "fewshot_split: examples")
    text = text.replace("data_files:\n", f"data_files:\n    examples: {examples}\n")

    def digest(fewshot=2, **edits):
        for path in (rows, examples):
            content = (task_files / "rows.jsonl").read_text()
            path.write_text(content.replace("w", edits.get(path.stem, "w"), 1))
        other.write_text(text.replace("num_fewshot: 2", f"num_fewshot: {fewshot}"))
        return digest_tasks(find_tasks([str(other)]))

    assert digest() == digest()
    assert len({digest(), digest(fewshot=1), digest(rows="w1"), digest(examples="w1")}) == 4
    # what has no source says where it lies in memory
    config = SimpleNamespace(num_fewshot=0)
    made = [SimpleNamespace(dump_config=partial(dict, f=object()), eval_docs=[], config=config) for _ in "ab"]
    assert len({digest_tasks(Tasks({"tasks": {"t": task}}, None)) for task in made}) == 1


GOOD = "task: x\noutput_type: multiple_choice\ntest_split: test\ndataset_path: "


def test_files_that_are_no_tasks_and_tasks_that_cannot_be_given(tmp_path, setup, task_files, monkeypatch):
    with pytest.raises(InputError, match="holds no task"):
        find_tasks([str(tmp_path)])
    file, same = tmp_path / "task.yaml", str(task_files / "text.yaml")
    for text, problem in (
        ("hello: 1", "is not a task of lm-eval: it has no `task:` name"),
        ("- task", "is not a task of lm-eval"),
        ("task: [x", "cannot read"),
        ("group: g\ntask: [a, b]", "is a group, not a task; give the directory"),
        ("task: x\nmistake: 1", "unexpected keyword argument 'mistake'"),
        ("task: x\ndoc_to_text: !function gone.function", "Cannot import module 'gone'"),
        (f"{GOOD}json\ndataset_kwargs: {{data_files: {{test: gone.json}}}}", "gone.json"),
        (f"{GOOD}org/gone", "the dataset of task .* cannot be reached .* YAML file"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=problem):
            find_tasks([str(file)])
    text = Path(same).read_text()
    file.write_text(text)
    with pytest.raises(InputError, match="another of --tasks holds 'tiny_text' too"):
        find_tasks([str(task_files), str(file)])
    assert list(find_tasks([same, same]).loaded["tasks"]) == ["tiny_text"]
    for key, problem in (("unsafe_code: true", "runs code"), ("doc_to_image: [q]", "images")):
        file.write_text(f"{text}{key}\n")
        with pytest.raises(InputError, match=problem):
            find_tasks([str(file)])
    # more text than the model has positions
    file.write_text(text.replace("max_gen_toks: 5", "max_gen_toks: 256"))
    with pytest.raises(InputError, match="cache 'reference': .* maximum sequence length"):
        run_tasks(setup, find_tasks([str(file)]), [])
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(InputError, match=r"pip install 'fp8kv\[eval\]'"):
        find_tasks(["hellaswag"])


def test_a_token_that_the_embedding_has_no_row_for(setup, task_files, tmp_path):
    setup = replace(setup, tokenizer=copy.deepcopy(setup.tokenizer))
    setup.tokenizer.add_tokens(["w128"])
    file = task_files / "likelihood.yaml"
    assert "tasks" in run_tasks(setup, find_tasks([str(file)], limit=1), [])
    (tmp_path / "unknown.yaml").write_text(file.read_text().replace("{{q}}", "{{q}} w128"))
    with pytest.raises(InputError, match="has 129 tokens and the model's embedding 128 rows"):
        run_tasks(setup, find_tasks([str(tmp_path / "unknown.yaml")]), [])
    assert not setup.model.get_input_embeddings()._forward_pre_hooks


def test_the_report_has_the_tasks(small_directory, task_files, tmp_path, monkeypatch):
    monkeypatch.setitem(inputs.SUITES, "quick", Suite(4, 2, 16, 1, 2, (), (), 1))
    flags = ("--device", "cpu", "--dataset", "random", "--variants", "tensor")
    likelihood, text = (str(task_files / f"{name}.yaml") for name in ("likelihood", "text"))
    tasks = ("--tasks", f"{likelihood},{text}", "--task-limit", 3, "-o", tmp_path)
    done = ran("eval", small_directory, *flags, *tasks)
    assert f"lm-eval {lm_eval.__version__}, --task-limit 3" in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if "exact_match" in line)
    assert [cell.strip() for cell in line.split("│")[1:4]] == ["tiny_text", "exact_match", "1 ± 0"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["harness"]["limit"], list(report["tasks"])) == (3, ["tiny_likelihood", "tiny_text"])
    assert list(report["tasks"]["tiny_text"]) == ["reference", "tensor"]
    assert report["tasks"]["tiny_text"]["reference"]["exact_match"]["value"] == 1.0
    assert "| tiny\\_text | exact\\_match | 1 ± 0 |" in (tmp_path / "report.md").read_text()
    monkeypatch.setattr(run, "load_model", None)  # mistakes are told before
    (tmp_path / "none.yaml").write_text("hello: 1")
    done = fp8kv("eval", small_directory, *flags, "--tasks", tmp_path / "none.yaml")
    one_line_error(done, "is not a task of lm-eval")
    done = fp8kv("eval", small_directory, *flags, "--tasks", "x", "--task-limit", 0)
    one_line_error(done, "--task-limit should be", "equal to 1")
    none = TaskFigure(value=None, stderr=None)
    rows = task_table(Report.model_construct(tasks={"t": {"reference": {"m": none}}})).lines
    assert rows == [("t", "m", "n/a")]


def test_nothing_of_lm_eval_and_matplotlib_is_shown(small_directory, task_files, tmp_path):
    # in a process of its own, which imports both; a user's style is not that of the page
    (tmp_path / "matplotlibrc").write_text("xtick.direction: in\nsvg.fonttype: path\n")
    small = ("--device", "cpu", "--dataset", "random", "--samples", "2", "--seq-len", "16", "--json")
    tasks = ("--variants", "tensor", "--task-limit", "1", "--tasks", task_files / "text.yaml", "-o", "report")
    code = "import sys\nfrom calib.commands.app import main\nassert 'matplotlib' not in sys.modules\n"
    code += "try: main()\nfinally:\n import matplotlib\n assert 'matplotlib.pyplot' not in sys.modules\n"
    code += " assert matplotlib.rcParams['xtick.direction'] == 'in'\n"
    command = [sys.executable, "-c", code, "eval", small_directory, *small, *tasks]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""
    report = Report.model_validate_json(done.stdout)
    assert report.tasks
    assert (tmp_path / "report/report.html").read_text() == render_html(report)
