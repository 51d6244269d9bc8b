import json
import random

from experiments import long_documents_page as shown
from experiments.long_documents import FILLER, passkey_document, texts
from experiments.training_memory import PAGE, RESULT, table
from phasewise.data.passkey import CLOSED


def test_every_passkey_is_told_twice_in_a_document_longer_than_a_row():
    novel = "the sea was calm and grey. " * 400
    document = passkey_document(random.Random(0), [novel])
    told = [line for line in document.split("\n") if line.endswith(CLOSED.strip())]
    assert len(told) >= 16
    assert {told.count(line) for line in told} == {2}
    assert len(document) > FILLER


def test_a_novel_of_two_collections_counts_once_and_held_out_ones_are_no_part_of_training(tmp_path):
    source = random.Random(1)
    words = ["".join(source.choices("abcdefghij", k=6)) for _ in range(4000)]
    for number in range(14):
        text = " ".join(source.choices(words, k=3000))
        for collection in ("one", "two") if number == 0 else ("one",):
            (tmp_path / collection).mkdir(exist_ok=True)
            title = "A TITLE\n\n" if collection == "two" else ""
            (tmp_path / collection / f"{collection}__{number}.txt").write_text(title + text)
    texts([tmp_path / "one", tmp_path / "two"], tmp_path / "out")
    novels = {split: {path.name for path in (tmp_path / "out" / "novels" / split).iterdir()} for split in
              ("train", "validation", "test")}  # fmt: skip
    assert [len(novels[split]) for split in ("train", "validation", "test")] == [2, 4, 8]
    training = [path.read_text() for path in (tmp_path / "out" / "novels" / "train").iterdir()]
    stretches = (tmp_path / "out" / "mixed" / "train" / "passkeys").iterdir()
    for path in list(stretches)[:20]:
        assert any(path.read_text().partition("\n")[0] in novel for novel in training)


def test_pages_show_what_the_records_hold():
    assert shown.PAGE.read_text() == shown.page()
    assert table(json.loads((shown.ROOT / RESULT).read_text())) in (shown.ROOT / PAGE).read_text()
