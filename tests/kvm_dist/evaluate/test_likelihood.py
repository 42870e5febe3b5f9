"""What a harness is told: log-likelihoods and texts, whatever their lengths."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kvm_dist.data.tokenizer import ByteTokenizer
from kvm_dist.evaluate import tasks
from kvm_dist.evaluate.likelihood import TextModel, Writing, until, writing_of
from kvm_dist.evaluate.tasks import Options, find_task
from kvm_dist.exit_codes import ConfigError, DataError
from models.backbone import Backbone
from models.generate import generate
from parallel.sequence.context import WholeSequence
from tests.kvm_dist.evaluate.conftest import nobody_watches
from tests.kvm_dist.evaluate.tiny_checkpoint import TinyRun

PAIRS = [("The cat", " sat."), ("The cat ", "sat."), ("", "word"), ("One two", "!"), ("abcdefg", " xyz")]


def told(run: TinyRun, longest: int | None = None) -> TextModel:
    return TextModel(run.model, ByteTokenizer(), nobody_watches, longest)


def losses_behind_separator(model: Backbone, text: str) -> torch.Tensor:
    ids = torch.tensor([[0, *text.encode()]])
    with torch.no_grad():
        logits = model(ids[:, :-1], WholeSequence())
    return F.cross_entropy(logits[0], ids[0, 1:], reduction="none")


def test_a_continuation_has_the_likelihood_that_it_has_alone(tiny_run: TinyRun) -> None:
    found = told(tiny_run).log_likelihoods(PAIRS)
    for (context, continuation), (likelihood, _) in zip(PAIRS, found, strict=True):
        scored = len(context + continuation) - len(context.rstrip())
        wanted = losses_behind_separator(tiny_run.model, context + continuation)[-scored:].sum()
        assert likelihood == pytest.approx(-float(wanted), rel=1e-5)
    assert found[0] == found[1], "a space before a continuation is a part of it, on whichever side it stands"


def likeliest_byte(model: Backbone, text: str) -> int:
    return int(generate(model, torch.tensor([0, *text.encode()]), 1, 0.0, torch.Generator()))


def test_a_continuation_is_greedy_if_the_model_writes_it(tiny_run: TinyRun) -> None:
    letters = ((chr(code), likeliest_byte(tiny_run.model, chr(code))) for code in range(ord("a"), 128))
    prompt, best = next((prompt, chr(best)) for prompt, best in letters if 33 <= best < 126)
    pairs = [(prompt, best), (prompt, chr(ord(best) + 1)), ("", prompt + best)]
    found = told(tiny_run).log_likelihoods(pairs)
    starts_so = likeliest_byte(tiny_run.model, "") == ord(prompt)
    assert [greedy for _, greedy in found] == [True, False, starts_so]


def test_a_document_is_read_whole_or_in_windows(tiny_run: TinyRun) -> None:
    text = "A text of some words, and of some more."
    whole, empty = told(tiny_run).document_log_likelihoods([text, ""])
    assert whole == pytest.approx(-float(losses_behind_separator(tiny_run.model, text).sum()), rel=1e-5)
    assert empty == 0
    (cut,) = told(tiny_run, longest=20).document_log_likelihoods([text])
    with torch.no_grad():
        ids = torch.tensor([0, *text.encode()])
        parts = [ids[start : start + 21] for start in range(0, len(ids) - 1, 20)]
        wanted = sum(
            F.cross_entropy(tiny_run.model(part[None, :-1], WholeSequence())[0], part[1:], reduction="sum")
            for part in parts
        )
    assert cut == pytest.approx(-float(wanted), rel=1e-5)


def test_a_bound_on_the_context_keeps_the_last_tokens(tiny_run: TinyRun) -> None:
    pairs = [("some long context", " end"), ("some ", "long end")]  # the second fills the bound alone
    found = told(tiny_run, longest=6).log_likelihoods(pairs)
    for text, scored, (likelihood, _) in zip((b"ext end", b"ong end"), (4, 6), found, strict=True):
        with torch.no_grad():
            ids = torch.tensor([list(text)])
            logits = tiny_run.model(ids[:, :-1], WholeSequence())[0]
            losses = F.cross_entropy(logits, ids[0, 1:], reduction="none")
        assert likelihood == pytest.approx(-float(losses[-scored:].sum()), rel=1e-5)


def test_texts_are_written_to_their_stops_in_the_order_of_their_requests(tiny_run: TinyRun) -> None:
    prompts = ["The cat", "A", "The dog"]
    free = told(tiny_run).write([Writing(prompt, tokens=8) for prompt in prompts])
    for prompt, text in zip(prompts, free, strict=True):
        ids = torch.tensor([0, *prompt.encode()])
        wanted = generate(tiny_run.model, ids, 8, 0.0, torch.Generator()).tolist()
        ended = wanted.index(0) if 0 in wanted else 8
        assert text == ByteTokenizer().decode(wanted[:ended])
    stop = free[2][2:4]
    assert told(tiny_run).write([Writing(prompts[2], (stop,), 8)]) == [free[2][: free[2].index(stop)]]
    drawn = [Writing(prompt, tokens=8, temperature=5.0) for prompt in prompts]
    assert told(tiny_run).write(drawn) == told(tiny_run).write(drawn) != free


def test_a_text_ends_before_the_first_of_its_stops() -> None:
    assert until("one. two\nthree", ("\n", ". ")) == "one"
    assert until("one", ("x",)) == "one"


def test_requests_keep_their_settings() -> None:
    assert writing_of("p", {"until": "\n", "max_gen_toks": 7}) == Writing("p", ("\n",), 7)
    assert writing_of("p", {"until": ["a", ""], "do_sample": False, "temperature": 0.7}) == Writing(
        "p", ("a",)
    )
    assert writing_of("p", {"do_sample": True, "temperature": 0.7}).temperature == 0.7


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for lm_eval that asks one question of each kind."""
    asked = SimpleNamespace(settings={}, error=None)

    def simple_evaluate(model: Any, tasks: list[str], **settings: Any) -> dict[str, Any]:
        asked.settings = settings
        if asked.error is not None:
            raise asked.error
        (likelihood,) = model.loglikelihood([SimpleNamespace(args=("The cat", " sat."))])
        (document,) = model.loglikelihood_rolling([SimpleNamespace(args=("A text.",))])
        (text,) = model.generate_until([SimpleNamespace(args=("A", {"until": ["\n"], "max_gen_toks": 4}))])
        asked.answers = (likelihood, document, text)
        scores = {
            "acc,none": 0.5,
            "acc_stderr,none": "N/A",
            "exact,strict": 1,
            "alias": "own",
            "sample_len": 3,
        }
        return {"results": {tasks[0]: scores}, "n-shot": {tasks[0]: 0}}

    names = ("lm_eval", "lm_eval.api", "lm_eval.api.instance", "lm_eval.api.model", "lm_eval.tasks")
    modules = {name: ModuleType(name) for name in names}
    modules["lm_eval"].simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    modules["lm_eval.api.instance"].Instance = object  # type: ignore[attr-defined]
    modules["lm_eval.api.model"].LM = object  # type: ignore[attr-defined]
    manager = lambda include_path: SimpleNamespace(all_tasks=["own", "lambada_openai"])  # noqa: E731
    modules["lm_eval.tasks"].TaskManager = manager  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "kvm_dist.evaluate.lm_eval", raising=False)
    return asked


def test_the_harness_gets_the_model_and_its_scores_come_back(
    tiny_run: TinyRun, harness: SimpleNamespace
) -> None:
    from kvm_dist.evaluate.lm_eval import evaluate

    options = Options(argument="own", limit=3, shots=0, seed=5)
    outcome = evaluate(tiny_run.open(), options, nobody_watches)
    assert outcome.metrics == {"own/acc": 0.5, "own/exact strict": 1.0}
    assert outcome.rows == [("own", "acc", "0.5"), ("own", "exact strict", "1")]
    assert harness.settings["limit"] == 3
    assert harness.settings["fewshot_random_seed"] == 5
    mine = told(tiny_run)
    assert harness.answers == (
        mine.log_likelihoods([("The cat", " sat.")])[0],
        mine.document_log_likelihoods(["A text."])[0],
        mine.write([Writing("A", ("\n",), 4)])[0],
    )


def test_unknown_tasks_and_data_that_is_not_here_have_their_own_errors(
    tiny_run: TinyRun, harness: SimpleNamespace
) -> None:
    from kvm_dist.evaluate.lm_eval import evaluate

    opened = tiny_run.open()
    with pytest.raises(ConfigError, match="no such task; did you mean lambada_openai"):
        evaluate(opened, Options(argument="lambada_opnai"), nobody_watches)
    with pytest.raises(ConfigError, match="which task"):
        evaluate(opened, Options(), nobody_watches)
    with pytest.raises(ConfigError, match=r"--tasks-dir .*absent: no such folder"):
        evaluate(opened, Options(argument="own", tasks_dir=tiny_run.data / "absent"), nobody_watches)
    harness.error = ConnectionError("Couldn't reach the hub")
    with pytest.raises(DataError, match=r"not on this machine: ConnectionError.*HF_HOME.*--tasks-dir"):
        evaluate(opened, Options(argument="own"), nobody_watches)
    harness.error = KeyError("question")
    with pytest.raises(
        ConfigError, match=r"own: cannot be set up: KeyError: 'question'; mend the task's file"
    ):
        evaluate(opened, Options(argument="own"), nobody_watches)


def test_an_error_of_the_model_is_not_taken_for_one_of_a_task(
    tiny_run: TinyRun, harness: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvm_dist.evaluate.lm_eval import evaluate

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("kvm_dist.evaluate.likelihood.TextModel.log_likelihoods", broken)
    with pytest.raises(ZeroDivisionError):
        evaluate(tiny_run.open(), Options(argument="own"), nobody_watches)


def test_without_the_harness_the_error_names_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package lm_eval.*pip install 'kvm-dist\[eval\]'"):
        find_task("lm-eval:lambada_openai")
    assert find_task("needle") == (tasks.TASKS["needle"], "")


def test_a_task_that_is_not_there_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="--task perplexty: unknown task; did you mean perplexity"):
        find_task("perplexty")
