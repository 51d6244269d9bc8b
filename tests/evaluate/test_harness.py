import json
import math

import pytest
import torch
from torch import nn

from phasewise.encodings import RoPEConfig
from phasewise.hf.language_model import open_language_model
from phasewise.model import ModelConfig, Transformer
from phasewise.model.generate import generate

pytest.importorskip("lm_eval", reason="the harness needs lm-eval: pip install 'phasewise[eval]'")
from lm_eval.api.instance import Instance

from phasewise.evaluate import tasks
from phasewise.evaluate.harness import Harness, Text

CPU = torch.device("cpu")
START, MERGED = 0, 256
"""The toy tokenizer: bytes, but "ab" is one token, whatever stands on either side."""


def encode(text):
    return [MERGED if piece == "ab" else byte for piece in _pieces(text) for byte in piece.encode()[:1]]


def _pieces(text):
    while text:
        size = 2 if text.startswith("ab") else 1
        yield text[:size]
        text = text[size:]


def decode(tokens):
    return "".join("ab" if token == MERGED else chr(token) for token in tokens)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=257, width=16, layers=2, heads=2, encoding=RoPEConfig()))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def harness(model, **options):
    return Harness(model, Text(encode, decode, START, stop=[ord("!")]), device=CPU, **options)


def asked(kind, *arguments):
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


@torch.no_grad()
def restated(model, before, after):
    """Log-likelihood of tokens after others, one forward pass a token in float64, and whether all are greedy."""
    total, greedy, seen = 0.0, True, list(before)
    for token in after:
        logits = model(torch.tensor([seen]))[0, -1].double()
        total += logits.log_softmax(-1)[token].item()
        greedy &= int(logits.argmax()) == token
        seen.append(token)
    return total, greedy


@pytest.mark.parametrize("batch_tokens", [1, 64, 4096])
def test_loglikelihood_is_that_of_the_tokens_that_the_context_does_not_determine(model, batch_tokens):
    cases = {
        ("the dog", " barks"): (encode("the dog"), encode(" barks")),
        ("the dog ", "barks"): (encode("the dog"), encode(" barks")),
        ("cra", "b"): (encode("cr"), [MERGED]),
        ("ra", "bbit"): (encode("r"), [MERGED, *encode("bit")]),
        ("", "hello"): ([START], encode("hello")),
        ("a", "b"): ([START], [MERGED]),
    }
    found = harness(model, batch_tokens=batch_tokens).loglikelihood(asked("loglikelihood", *cases))
    for (likelihood, greedy), (before, after) in zip(found, cases.values(), strict=True):
        wanted, is_greedy = restated(model, before, after)
        assert likelihood == pytest.approx(wanted, rel=1e-5)
        assert greedy == is_greedy


def test_a_checkpoint_that_turns_by_length_gives_each_row_its_own(tmp_path):
    pytest.importorskip("transformers", reason="LongRoPE by transformers")
    from tests.hf.tiny import tiny

    tiny("phi3, longrope beyond its original length").save_pretrained(tmp_path)
    text = Text(lambda text: [ord(letter) % 64 for letter in text], str, START)
    cases = [("near", " by"), ("farther away than the original length of it", " still")]
    found = []
    for batch_tokens in (1, 4096):
        opened = Harness(open_language_model(tmp_path), text, device=CPU, batch_tokens=batch_tokens)
        found.append([likelihood for likelihood, _ in opened.loglikelihood(asked("loglikelihood", *cases))])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_greedy_is_told_of_the_continuation_that_the_model_makes(model):
    with torch.no_grad():
        made = generate(model, torch.tensor([encode("it is")]), length=3)[0, -3:].tolist()
    context, rows = [ord(letter) for letter in "it is"], []
    for after in (made, [*made[:2], made[2] ^ 1]):
        rows.append(harness(model)._batch([_row([*context, *after], len(context))]))
    assert [greedy for row in rows for _, greedy in row] == [True, False]


def _row(tokens, first):
    from phasewise.evaluate.harness import _Row

    return _Row(tokens, first)


def test_rolling_loglikelihood_scores_every_token_once_with_whole_windows(model):
    text, length = "it was the best of times", 10
    tokens = encode(text)
    wanted = restated(model, [START], tokens[:length])[0]
    for first in range(length, len(tokens), length):
        last = min(first + length, len(tokens))
        wanted += restated(model, tokens[last - length - 1 : first], tokens[first:last])[0]
    (found,) = harness(model, rolling_length=length).loglikelihood_rolling(
        asked("loglikelihood_rolling", (text,))
    )
    assert found == pytest.approx(wanted, rel=1e-5)


def test_nothing_to_score_has_a_loglikelihood_of_zero(model):
    assert harness(model).loglikelihood_rolling(asked("loglikelihood_rolling", ("",), ("a",)))[0] == 0
    assert harness(model).loglikelihood(asked("loglikelihood", ("", ""), ("a", ""))) == [(0.0, True)] * 2


def test_what_stands_before_every_text_stands_there_once(model):
    text, before = "it was the best of times", [5, 6]
    tokens = encode(text)
    reads = Harness(
        model, Text(encode, decode, START, before=tuple(before)), device=CPU, rolling_length=len(tokens) - 4
    )
    cases = {("the dog", " barks"): encode("the dog"), ("", " barks"): []}
    found = reads.loglikelihood(asked("loglikelihood", *cases))
    for (likelihood, _), context in zip(found, cases.values(), strict=True):
        wanted, _ = restated(model, [*before, *context], encode(" barks"))
        assert likelihood == pytest.approx(wanted, rel=1e-5)
    (rolling,) = reads.loglikelihood_rolling(asked("loglikelihood_rolling", (text,)))
    wanted = restated(model, before, tokens[:-4])[0] + restated(model, before + tokens[3:-4], tokens[-4:])[0]
    assert rolling == pytest.approx(wanted, rel=1e-5)
    for context in ("it is", ""):
        (made,) = reads.generate_until(asked("generate_until", (context, {"max_gen_toks": 5})))
        after = torch.tensor([[*before, *encode(context)]])
        with torch.no_grad():
            assert made == decode(generate(model, after, length=5)[0, after.shape[1] :].tolist())


def test_generation_is_greedy_and_ends_before_a_stop_string(model):
    whole = decode(generate(model, torch.tensor([encode("it is")]), length=12)[0, -12:].tolist())
    (found,) = harness(model).generate_until(asked("generate_until", ("it is", {"max_gen_toks": 12})))
    assert found == whole.partition("!")[0]
    options = {"max_gen_toks": 12, "until": [whole[4:6]]}
    (found,) = harness(model).generate_until(asked("generate_until", ("it is", options)))
    assert found == whole[: whole.index(whole[4:6])]
    with pytest.raises(ValueError, match="generation is greedy, but a task asks for"):
        harness(model).generate_until(asked("generate_until", ("it is", {"do_sample": True})))


GOALS = [
    {"goal": f"open {what}", "sol1": f"pull {one}", "sol2": f"push the {two}", "label": number % 2}
    for number, (what, one, two) in enumerate(
        (what, one, two)
        for what in ("a jar", "the door", "an old box")
        for one in ("it", "at the lid")
        for two in ("handle hard", "top", "crab")
    )
]


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def known():
    return tasks.Tasks()


@pytest.mark.slow
def test_accuracies_of_a_local_task_equal_an_independent_loop(model, known, tmp_path):
    path = lines(tmp_path / "piqa.jsonl", GOALS)
    right = normed = 0
    for row in GOALS:
        before = encode(f"Question: {row['goal']}\nAnswer:")
        choices = [f" {row['sol1']}", f" {row['sol2']}"]
        scores = [restated(model, before, encode(choice))[0] for choice in choices]
        right += scores.index(max(scores)) == row["label"]
        per_letter = [score / (len(choice) - 1) for score, choice in zip(scores, choices, strict=True)]
        normed += per_letter.index(max(per_letter)) == row["label"]
    (score,) = known.run(harness(model), f"piqa:{path}")
    assert (score.task, score.examples) == ("piqa", len(GOALS))
    assert score.metrics == pytest.approx({"acc": right / len(GOALS), "acc_norm": normed / len(GOALS)})
    assert 0 < score.metrics["acc"] < 1
    (limited,) = known.run(harness(model), f"piqa:{path}", limit=5)
    assert limited.examples == 5


@pytest.mark.slow
def test_lambada_as_context_and_word_is_scored_on_its_last_word(model, known, tmp_path):
    rows = [
        {"context": "a long\nday and", "continuation": "night"},
        {"context": "the", "continuation": "end"},
    ]
    losses = [restated(model, encode(row["context"]), encode(f" {row['continuation']}"))[0] for row in rows]
    (score,) = known.run(harness(model), f"lambada_openai:{lines(tmp_path / 'rows.jsonl', rows)}")
    assert score.metrics["perplexity"] == pytest.approx(math.exp(-sum(losses) / 2), rel=1e-4)


@pytest.mark.slow
def test_a_folder_gives_the_tasks_of_a_group_and_their_mean(model, known, tmp_path):
    for name, count in (("wh_island", 3), ("causative", 4)):
        pairs = [
            {
                "sentence_good": f"the dog barks {number}",
                "sentence_bad": f"the dog bark {number}",
                "UID": name,
            }
            for number in range(count)
        ]
        lines(tmp_path / f"{name}.jsonl", pairs)
    first, second, mean = known.run(harness(model), f"blimp:{tmp_path}")
    assert {first.task, second.task} == {"blimp_wh_island", "blimp_causative"}
    assert (mean.task, mean.examples) == ("blimp", 7)
    assert mean.metrics["acc"] == pytest.approx((first.metrics["acc"] + second.metrics["acc"]) / 2)
    lines(tmp_path / "no_such.jsonl", [{"sentence_good": "a", "sentence_bad": "b"}])
    with pytest.raises(ValueError, match="lm-eval has no task 'blimp_no_such'"):
        known.check(f"blimp:{tmp_path}")


@pytest.mark.slow
def test_cbt_takes_the_word_with_the_likeliest_rest_of_its_sentence(model, known, tmp_path):
    options = ["dog", "cat", "sea", "crab"]
    rows = [
        {
            "sentences": ["1 A day .", f"2 It was {what} ."],
            "question": "3 the XXXXX barks .",
            "answer": answer,
        }
        | {"options": options}
        for what in ("late", "grey", "hot", "dull")
        for answer in options
    ]
    right = 0
    for row in rows:
        before = encode(" ".join([*row["sentences"], "3 the"]))
        scores = [restated(model, before, encode(f" {option} barks ."))[0] for option in options]
        right += options[scores.index(max(scores))] == row["answer"]
    (score,) = known.run(harness(model), f"cbt_cn:{lines(tmp_path / 'rows.jsonl', rows)}")
    assert (score.task, score.examples) == ("cbt_cn", 16)
    assert score.metrics == {"acc": right / 16}
    assert 0 < right < 16


def test_arc_as_requests_becomes_its_questions(tmp_path):
    document = {"id": "q1", "query": "Question: Which?\nAnswer:", "choices": ["this", "that"], "gold": 1}
    path = lines(tmp_path / "requests.jsonl", [{"doc": document, "idx": number} for number in (0, 1)])
    (row,) = tasks.local(f"arc_easy:{path}").documents["arc_easy"]
    assert row == {
        "question": "Which?",
        "choices": {"text": ["this", "that"], "label": ["A", "B"]},
        "answerKey": "B",
    }


@pytest.mark.slow
def test_a_limit_counts_documents_of_each_length_they_were_made_to():
    made = [{"max_length": length} for length in (512, 1024) for _ in range(3)]
    assert list(tasks._first(made, 2)) == [0, 1, 3, 4]
    assert list(tasks._first([{"text": "a"}] * 5, 2)) == [0, 1]
    assert list(tasks._first(made, None)) == list(range(6))


def test_a_length_at_which_documents_would_be_made_for_ever_is_refused(known, monkeypatch):
    monkeypatch.setattr(known, "counts", True)
    monkeypatch.setattr(known, "shortest", 512)
    for name in ("ruler_vt", "ruler"):
        with pytest.raises(ValueError, match=rf"of {name} at 512 tokens: give lengths from 1024 on"):
            known.check(name)
    monkeypatch.setattr(known, "shortest", 1024)
    known.check("ruler_vt")


def test_tasks_that_count_tokens_are_refused_where_no_checkpoint_has_a_tokenizer(known, monkeypatch):
    for name in ("niah_single_1", "ruler_vt", "ruler"):
        with pytest.raises(
            ValueError, match=f"{name} makes documents of so many tokens, but no checkpoint has a"
        ):
            known.check(name)
    known.check("piqa")
    monkeypatch.setattr(known, "counts", True)
    known.check("niah_single_1")


def test_unknown_tasks_and_unreachable_data_are_named_with_the_remedy(model, known, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="lm-eval has no task 'lambda'"):
        known.check("lambda")

    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach 'baber/piqa' on the Hub")

    monkeypatch.setattr(known._manager, "load", unreachable)
    with pytest.raises(
        ValueError, match=r"data of task piqa cannot be had .* give a local file, as piqa:PATH"
    ):
        known.run(harness(model), "piqa")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no file or folder"),
        ("{broken", "cannot be read for task piqa"),
        ("[" * 100_000, "nested too deeply"),
        ("\n", "holds no documents"),
    ],
)
def test_bad_local_documents_are_named(tmp_path, content, said):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=said):
        tasks.local(f"piqa:{path}")
