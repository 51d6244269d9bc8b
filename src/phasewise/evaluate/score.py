"""What a model scores on a task of lm-eval; apart from the harness, so that reading a report needs no lm-eval."""

from pydantic import BaseModel, ConfigDict


class TaskScore(BaseModel):
    """A model's result on one task of lm-eval, under the names that lm-eval gives its metrics."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    examples: int
    metrics: dict[str, float]
