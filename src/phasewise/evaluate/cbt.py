"""The Children's Book Test as tasks of lm-eval, which has none: which of ten words was left out of a sentence.

From Hill et al., "The Goldilocks Principle", arXiv 1511.02301. A word is scored by the log-likelihood of
itself and the rest of its sentence, after twenty sentences of context, as Radford et al. (2019) score it.
"""

from typing import Any

LEFT_OUT = "XXXXX"
KINDS = {"cbt_cn": "CN", "cbt_ne": "NE", "cbt_v": "V", "cbt_p": "P"}
"""Common nouns, named entities, verbs, prepositions."""


def _context(row: dict[str, Any]) -> str:
    return " ".join([*row["sentences"], row["question"].partition(LEFT_OUT)[0]])


def _choices(row: dict[str, Any]) -> list[str]:
    rest = row["question"].partition(LEFT_OUT)[2]
    return [option + rest for option in row["options"]]


def _answer(row: dict[str, Any]) -> int:
    return row["options"].index(row["answer"])


DEFINITIONS: dict[str, dict[str, Any]] = {
    task: {
        "task": task,
        "dataset_path": "cam-cst/cbt",
        "dataset_name": kind,
        "output_type": "multiple_choice",
        "validation_split": "validation",
        "test_split": "test",
        "doc_to_text": _context,
        "doc_to_choice": _choices,
        "doc_to_target": _answer,
        "target_delimiter": "",
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    for task, kind in KINDS.items()
}
"""What lm-eval takes in place of a task's name."""
