"""Tokenised shards are the source, whatever interrupts the work; what is damaged or has changed is named."""

from __future__ import annotations

import errno
import json
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from phasewise.data import batch, documents, load, tokenization, windows
from phasewise.data.documents import split_of
from phasewise.data.kinds import Origin
from phasewise.data.shards import verify
from phasewise.data.tokenization import collect, tokenize
from phasewise.interrupt import Interrupted
from phasewise.record import replacing

WORDS = ["It", "was", "a", "truth", "universally", "acknowledged,", "ÿ£", "that", "sets", "the", "phase."]
DOCUMENTS = 90


def prose(seed: int) -> str:
    random = np.random.default_rng(seed)
    return " ".join(random.choice(WORDS) for _ in range(20 + seed % 50))


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    folder = tmp_path / "lines"
    folder.mkdir()
    for part in range(3):
        rows = [{"text": prose(each), "other": each} for each in range(DOCUMENTS) if each % 3 == part]
        (folder / f"{part}.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return folder


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization, "AT_ONCE", 900)
    monkeypatch.setattr(tokenization, "SAVE_EVERY", 2000)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def stopping_after(calls: int) -> Callable[[], bool]:
    left = iter(range(calls))
    return lambda: next(left, None) is None


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_shards_hold_the_documents_of_the_source_in_order_each_in_the_split_of_its_content(
    lines: Path, tmp_path: Path, tokenizer: str
) -> None:
    origin = Origin(data=f"jsonl:{lines}", tokenizer=tokenizer, held_out=0.15)
    index = tokenize(origin, tmp_path / "out", shard_tokens=700)
    corpus = load(f"shards:{tmp_path / 'out'}")
    order = [prose(each) for part in range(3) for each in range(part, DOCUMENTS, 3)]
    for split, members in corpus.splits.items():
        expected = [text for text in order if split_of(text.encode(), held_out=0.15, seed=0) == split]
        assert [corpus.decode(document) for document in members] == expected
        assert [len(document) for document in members] == members.lengths.tolist()
        assert corpus.bytes_per_token is not None
        assert members.lengths.sum() * corpus.bytes_per_token[split] == pytest.approx(
            sum(len(text.encode()) for text in expected)
        )
        assert members[-1].dtype == np.uint16
    assert len(index.splits["train"].shards) > 3
    assert corpus.encode is not None
    assert np.array_equal(corpus.encode(corpus.decode(corpus.split("test")[0])), corpus.split("test")[0])
    in_memory = load(f"jsonl:{lines}", tokenizer="bytes") if tokenizer == "bytes" else collect(origin)
    assert in_memory.vocab_size == corpus.vocab_size


def test_tokens_in_memory_and_in_shards_are_the_same(lines: Path, tmp_path: Path) -> None:
    origin = Origin(data=f"jsonl:{lines}", tokenizer="bpe:280", held_out=0.2, seed=3)
    tokenize(origin, tmp_path / "out", shard_tokens=500)
    mapped, in_memory = load(f"shards:{tmp_path / 'out'}"), collect(origin)
    assert mapped.bytes_per_token == in_memory.bytes_per_token
    for split in mapped.splits:
        for first, second in zip(mapped.split(split), in_memory.split(split), strict=True):
            assert np.array_equal(first, second)
    for corpus in (mapped, in_memory):
        assert windows(corpus, "train", length=16, limit_tokens=300).scored == 300
    drawn = [batch(each, "train", step=1, context=32, batch_size=4, seed=0) for each in (mapped, in_memory)]
    assert drawn[0].tokens.tolist() == drawn[1].tokens.tolist()


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_interrupted_work_goes_on_to_identical_shards(lines: Path, tmp_path: Path, tokenizer: str) -> None:
    origin = Origin(data=f"jsonl:{lines}", tokenizer=tokenizer, held_out=0.15)
    whole = tokenize(origin, tmp_path / "whole", shard_tokens=700)
    sittings = 0
    while True:
        sittings += 1
        try:
            begun = tmp_path / "parts" / "progress.json"
            learnt = 0 if tokenizer == "bytes" else 2 * whole.splits["train"].documents
            skipped = json.loads(begun.read_text())["documents"] if begun.exists() else learnt
            stop = stopping_after(skipped + 1)
            tokenize(origin, tmp_path / "parts", shard_tokens=700, stop=stop)
            break
        except Interrupted:
            assert not (tmp_path / "parts" / "index.json").exists()
    assert sittings > 4
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


@pytest.mark.parametrize("writes", range(1, 60, 7))
def test_work_killed_in_the_middle_of_any_write_goes_on_to_identical_shards(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    class Killed(BaseException):
        pass

    origin = Origin(data=f"jsonl:{lines}", held_out=0.15)
    tokenize(origin, tmp_path / "whole", shard_tokens=700)
    calls = iter(range(writes))
    append = tokenization.SplitWriter.append

    def dying(self: tokenization.SplitWriter, tokens: np.ndarray, *, text_bytes: int) -> None:
        if next(calls, None) is None:
            self._files[0].write(b"half a doc")
            raise Killed
        append(self, tokens, text_bytes=text_bytes)

    with monkeypatch.context() as patched:
        patched.setattr(tokenization.SplitWriter, "append", dying)
        with pytest.raises(Killed):
            tokenize(origin, tmp_path / "parts", shard_tokens=700)
    with pytest.raises(
        ValueError, match=r"no tokenised corpus at .*: it has no index.json; make one, or finish"
    ):
        load(f"shards:{tmp_path / 'parts'}")
    tokenize(origin, tmp_path / "parts", shard_tokens=700)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_a_full_disk_names_the_file_and_work_goes_on_once_there_is_space(lines: Path, tmp_path: Path) -> None:
    origin = Origin(data=f"jsonl:{lines}", held_out=0.15)
    tokenize(origin, tmp_path / "whole")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, before[1]))
    try:
        with pytest.raises(OSError, match=r"train-00000\.bin") as raised:
            tokenize(origin, tmp_path / "parts")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert raised.value.errno == errno.EFBIG
    tokenize(origin, tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


@pytest.fixture
def made(lines: Path, tmp_path: Path) -> Path:
    tokenize(Origin(data=f"jsonl:{lines}", held_out=0.15), tmp_path / "made", shard_tokens=700)
    return tmp_path / "made"


@pytest.mark.parametrize("name", ["train-00001.bin", "test-00000.lengths"])
def test_a_cut_or_missing_shard_is_named_at_once(made: Path, name: str) -> None:
    whole = (made / name).read_bytes()
    (made / name).write_bytes(whole[:-3])
    remedy = "restore it from a copy, or delete the folder and tokenise again"
    with pytest.raises(
        ValueError, match=f"{name} has {len(whole) - 3} bytes instead of {len(whole)}: {remedy}"
    ):
        load(f"shards:{made}")
    (made / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing: {remedy}"):
        load(f"shards:{made}")


def test_a_corrupt_shard_is_found_by_its_hash_on_demand(made: Path, lines: Path) -> None:
    path = made / "train-00001.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert load(f"shards:{made}")
    for check in (lambda: verify(made), lambda: tokenize(Origin(data=f"jsonl:{lines}", held_out=0.15), made)):
        with pytest.raises(ValueError, match=r"train-00001\.bin has changed since it was written: restore"):
            check()


def test_a_changed_tokenizer_or_a_damaged_index_is_named(made: Path) -> None:
    (made / "tokenizer.json").write_text("x")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not the tokenizer that made the shards"):
        load(f"shards:{made}")
    (made / "index.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match=r"index\.json is damaged"):
        load(f"shards:{made}")
    with pytest.raises(
        ValueError, match=r"no tokenised corpus at .*; make one, .* phasewise tokenize DATA --out"
    ):
        load(f"shards:{made.parent}")


def test_shards_may_be_asked_for_by_the_tokenizer_that_made_them_and_no_other(
    lines: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bpe"
    tokenize(Origin(data=f"jsonl:{lines}", tokenizer="bpe:300"), folder)
    assert load(f"shards:{folder}", tokenizer="bpe:300").sha256 == load(f"shards:{folder}").sha256
    with pytest.raises(ValueError, match="was made with bpe:300, not with gpt2: give that, or bytes"):
        load(f"shards:{folder}", tokenizer="gpt2")


def test_a_source_that_changed_since_is_named_in_the_middle_and_at_the_end(
    lines: Path, tmp_path: Path
) -> None:
    origin = Origin(data=f"jsonl:{lines}", held_out=0.15)
    tokenize(origin, tmp_path / "made")
    with pytest.raises(Interrupted):
        tokenize(origin, tmp_path / "begun", stop=stopping_after(1))
    first = lines / "0.jsonl"
    first.write_text(first.read_text().replace("the", "The", 1))
    with pytest.raises(ValueError, match=r"has changed among its first \d+ documents; delete .*begun"):
        tokenize(origin, tmp_path / "begun")
    with pytest.raises(
        ValueError, match=r"has changed since .*made was made; tokenise it into another folder"
    ):
        tokenize(origin, tmp_path / "made")
    first.write_text(json.dumps({"text": "alone"}))
    for path in (lines / "1.jsonl", lines / "2.jsonl"):
        path.unlink()
    with pytest.raises(ValueError, match=r"has 1 documents, \d+ before"):
        tokenize(origin, tmp_path / "begun")


def test_a_finished_folder_is_left_as_it_is_and_one_of_another_origin_is_refused(
    made: Path, lines: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.iterdir()}
    tokenize(Origin(data=f"jsonl:{lines}", held_out=0.15), made)
    assert {path: path.stat().st_mtime_ns for path in made.iterdir()} == before
    with pytest.raises(ValueError, match=r"was begun with held_out 0.15; go on with that, or choose another"):
        tokenize(Origin(data=f"jsonl:{lines}"), made)
    with pytest.raises(ValueError, match="holds other files; choose a new folder"):
        tokenize(Origin(data=f"jsonl:{lines}", held_out=0.15), lines.parent)


@pytest.mark.parametrize("save_every", [100, 1 << 24])
@pytest.mark.parametrize(
    "wrong", [{"field": "title", "tokenizer": "bytes"}, {"held_out": 1e-9}, {"tokenizer": "bpe:280"}]
)
def test_what_a_refusal_asks_for_can_be_done_in_the_same_folder(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_every: int, wrong: dict
) -> None:
    monkeypatch.setattr(tokenization, "SAVE_EVERY", save_every)
    right = {"data": f"jsonl:{lines}", "held_out": 0.15, "tokenizer": "bpe:300"}
    given = Origin.model_validate(right | {"held_out": 1e-9} | wrong)
    with pytest.raises(ValueError, match=r"--field|--held-out"):
        tokenize(given, tmp_path / "twice", shard_tokens=500)
    for name in ("twice", "once"):
        tokenize(Origin.model_validate(right), tmp_path / name)
    assert contents(tmp_path / "twice") == contents(tmp_path / "once")


def test_memory_is_refused_to_a_large_source_with_the_way_to_shards(
    lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "LARGEST_IN_MEMORY", 5000)
    (lines.parent / "a.fa").write_text(">one\n" + "ACGT" * 2000)
    for name in (f"jsonl:{lines}", f"text:{lines}", f"genome:{lines.parent / 'a.fa'}"):
        with pytest.raises(
            ValueError, match=rf"run phasewise tokenize {name} --out FOLDER once and give shards:"
        ):
            load(name)


def test_the_hash_of_a_corpus_in_shards_sees_its_tokens(lines: Path, tmp_path: Path) -> None:
    hashes = set()
    for number, origin in enumerate(
        [
            Origin(data=f"jsonl:{lines}", held_out=0.15),
            Origin(data=f"jsonl:{lines}", held_out=0.15, seed=1),
            Origin(data=f"jsonl:{lines}", held_out=0.15, tokenizer="bpe:270"),
        ]
    ):
        tokenize(origin, tmp_path / str(number))
        hashes.add(load(f"shards:{tmp_path / str(number)}").sha256)
    assert len(hashes) == 3


def test_one_core_gives_the_shards_that_all_cores_give(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = Origin(data=f"jsonl:{lines}", tokenizer="bpe:300", held_out=0.15)
    for parallel in ("false", "true"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        tokenize(origin, tmp_path / parallel)
    assert contents(tmp_path / "false") == contents(tmp_path / "true")


def test_a_second_process_is_kept_out_of_a_folder_in_use(lines: Path, tmp_path: Path) -> None:
    origin = Origin(data=f"jsonl:{lines}", held_out=0.15)
    refused = []

    def second() -> bool:
        with pytest.raises(ValueError, match=r"another process is tokenising into .*out; wait for it"):
            tokenize(origin, tmp_path / "out")
        refused.append(True)
        return False

    tokenize(origin, tmp_path / "out", stop=second)
    assert refused
    assert load(f"shards:{tmp_path / 'out'}")


@pytest.mark.parametrize("name", ["progress.json", "tokenizer.json", "index.json"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_full_disk_or_a_kill_at_any_document_of_the_folder_leaves_it_fit_to_go_on(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, when: str
) -> None:
    origin = Origin(data=f"jsonl:{lines}", tokenizer="bpe:270", held_out=0.15)
    tokenize(origin, tmp_path / "whole", shard_tokens=700)

    @contextmanager
    def failing(path: Path) -> Iterator[Path]:
        if path.name != name or when == "after":
            with replacing(path) as unfinished:
                yield unfinished
        if path.name == name:
            path.with_name(f".{name}.1").write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tokenization, "replacing", failing)
        with pytest.raises((OSError, RuntimeError)):
            tokenize(origin, tmp_path / "parts", shard_tokens=700)
    tokenize(origin, tmp_path / "parts", shard_tokens=700)
    assert contents(tmp_path / "whole").items() <= contents(tmp_path / "parts").items()


def test_the_user_s_wish_to_stop_is_heard_while_a_tokenizer_learns_while_skipping_and_while_checking(
    lines: Path, tmp_path: Path
) -> None:
    origin = Origin(data=f"jsonl:{lines}", tokenizer="bpe:300", held_out=0.15)
    with pytest.raises(Interrupted, match="document 0, while the tokenizer was learning"):
        tokenize(origin, tmp_path / "out", stop=stopping_after(40))
    whole = tokenize(origin, tmp_path / "whole")
    with pytest.raises(Interrupted, match=r"document \d\d$"):
        tokenize(origin, tmp_path / "out", stop=stopping_after(2 * whole.splits["train"].documents + 2))
    with pytest.raises(Interrupted, match=r"document \d\d$"):
        tokenize(origin, tmp_path / "out", stop=stopping_after(3))
    tokenize(origin, tmp_path / "out")
    with pytest.raises(Interrupted, match="document 0, as checking starts anew"):
        tokenize(origin, tmp_path / "out", stop=stopping_after(3))


def test_a_folder_inside_its_own_source_is_refused(lines: Path) -> None:
    with pytest.raises(ValueError, match=r"lies inside .*lines, which would hold its own shards; choose one"):
        tokenize(Origin(data=f"jsonl:{lines}", held_out=0.15), lines / "out")


def test_a_missing_shard_or_tokenizer_is_named_whoever_looks(made: Path, lines: Path, tmp_path: Path) -> None:
    (made / "train-00001.bin").unlink()
    with pytest.raises(ValueError, match=r"train-00001\.bin is missing: restore"):
        verify(made)
    origin = Origin(data=f"jsonl:{lines}", held_out=0.15)
    with pytest.raises(Interrupted):
        tokenize(origin, tmp_path / "begun", stop=stopping_after(1))
    (tmp_path / "begun" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing: restore"):
        tokenize(origin, tmp_path / "begun")


def test_a_tokenizer_without_a_token_for_a_text_is_named(lines: Path, tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"one": 0})).save(str(tmp_path / "words.json"))
    origin = Origin(data=f"jsonl:{lines}", tokenizer=str(tmp_path / "words.json"))
    with pytest.raises(
        ValueError, match=r"words\.json cannot write every text .*; give a tokenizer that can"
    ):
        tokenize(origin, tmp_path / "out")


def test_a_shard_without_tokens_can_be_read(tmp_path: Path) -> None:
    for name, text in (("train/a", "ab"), ("train/b", "zz"), ("test/c", "ab")):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).save(str(tmp_path / "bpe.json"))
    origin = Origin(data=f"text:{tmp_path / 'in'}", tokenizer=str(tmp_path / "bpe.json"))
    index = tokenize(origin, tmp_path / "out", shard_tokens=1)
    assert [shard.tokens for shard in index.splits["train"].shards] == [1, 0]
    corpus = load(f"shards:{tmp_path / 'out'}")
    assert [document.tolist() for document in corpus.split("train")] == [[2], []]
