import json

import pytest

from experiments.indirect_indexing_report import joined, main, read

CERTIFICATE = {"commit": "abc", "dirty": False, "device": "NVIDIA H200", "versions": {"torch": "2.11"}}


def part(variant, encoding, seed, curve, **changes):
    """What a training records, of accuracies by step; the loss is 1 less the accuracy, the test 0.01 above."""
    points = [
        {
            "steps": steps,
            "average": accuracy,
            "average_loss": 1 - accuracy,
            "average_test": accuracy + 0.01,
            "weights": accuracy / 2,
            "weights_loss": 1.0,
            "weights_test": accuracy / 2 + 0.01,
        }
        for steps, accuracy in curve.items()
    ]
    training = {"seed": seed, "steps": 8000, "model": {"encoding": {"kind": encoding}}}
    recipe = {"variant": variant, "changes": {variant: True}, "training": training, "rule": "the rule"}
    return {"values": points, "recipe": recipe, **CERTIFICATE, "date": "2026-11-29", **changes}


def with_recipe(seed, **changes):
    """A part of variant rate and PoPE, whose recipe says something else."""
    one = part("rate", "pope", seed, {8000: 0.5})
    return one | {"recipe": one["recipe"] | changes}


def with_training(seed, **changes):
    """The same, whose training was another."""
    return with_recipe(seed, training=with_recipe(seed)["recipe"]["training"] | changes)


def test_joined_models_keep_every_seed_and_the_certificate_of_their_run(tmp_path, monkeypatch):
    parts = [
        part("gated", "pope", seed, {4000: 0.5, 8000: accuracy})
        for seed, accuracy in ((1, 0.97), (0, 0.93), (2, 0.4))
    ]
    parts.append(part("gated", "rope", 0, {4000: 0.1, 8000: 0.2}, date="2026-11-30"))
    for number, one in enumerate(parts):
        (tmp_path / f"{number}.json").write_text(json.dumps(one))
    out = tmp_path / "joined" / "record.json"
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path), str(out)])
    main()
    document = json.loads(out.read_text())
    assert {name: document[name] for name in CERTIFICATE} == CERTIFICATE
    assert document["date"] == "2026-11-30"
    assert document["recipe"]["changes"] == {"gated": True}
    pope = document["values"]["pope"]
    assert [seed["seed"] for seed in pope["seeds"]] == [0, 1, 2]
    # The third seed was best at step 4000.
    assert pope["test_accuracy"]["seeds"] == pytest.approx([0.94, 0.98, 0.51])
    assert (pope["solved"], pope["seeds"][2]["best"]["steps"]) == (2, 4000)
    assert document["values"]["rope"]["test_accuracy"]["deviation"] is None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (part("paper", "pope", 1, {8000: 0.5}), "differ in variant: rate and paper"),
        (part("rate", "pope", 1, {8000: 0.5}, commit="def"), "differ in commit: abc and def"),
        (with_recipe(1, rule="another"), "differ in rule: the rule and another"),
        (with_recipe(1, changes={"clip": 2.0}), "differ in changes"),
        (with_training(1, learning_rate=1.0), "pope's seeds 0 and 1 were trained differently"),
        (part("rate", "pope", 0, {8000: 0.5}), "two parts are of pope, seed 0"),
        (part("rate", "pope", 1, {4000: 0.5}), "pope, seed 1 has 4000 of 8000 steps"),
    ],
)
def test_parts_that_do_not_belong_together_are_not_joined(other, words):
    with pytest.raises(ValueError, match=words):
        joined([part("rate", "pope", 0, {8000: 0.5}), other])


def test_a_folder_without_parts_is_named(tmp_path):
    with pytest.raises(ValueError, match="has no parts"):
        read(tmp_path)


def test_a_file_that_is_no_part_is_named(tmp_path):
    (tmp_path / "other.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"other\.json is no part"):
        read(tmp_path)
