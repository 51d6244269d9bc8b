from phasewise.data.corpus import Corpus
from pathlib import Path
def chorales(cache: Path | None) -> Corpus: raise NotImplementedError
def jsb(path: Path) -> Corpus: raise NotImplementedError
