"""The weights that a training starts from, where these are another model's."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from phasewise.model import Transformer
from phasewise.model.fitting import misfit
from phasewise.model.folder import WEIGHTS, load
from phasewise.record import file_sha256


class Initial(BaseModel):
    """A model's folder, and the hash of its weights; the model may have another encoding of the same shape."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    sha256: str

    @classmethod
    def of(cls, folder: Path) -> "Initial":
        """The model that is in `folder` now; ValueError when there is none."""
        return cls(folder=str(folder), sha256=_hash_of(folder))

    def fill(self, model: Transformer) -> None:
        """Give `model` these weights. Raises ValueError when they have changed or do not fit."""
        if _hash_of(Path(self.folder)) != self.sha256:
            raise ValueError(f"the weights in {self.folder} have changed since the run began: restore them")
        weights = load(self.folder).state_dict()
        if (problem := misfit(model.state_dict(), weights)) is not None:
            raise ValueError(
                f"the weights in {self.folder} do not fit the model to be trained: {problem}; give it their sizes"
            )
        model.load_state_dict(weights)


def _hash_of(folder: Path) -> str:
    path = folder / WEIGHTS
    if not path.is_file():
        raise ValueError(f"{folder} has no {WEIGHTS}; give the folder of a model of this library")
    return file_sha256(path)
