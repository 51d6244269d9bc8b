"""What is done to the folder of a checkpoint in tests; needs no transformers."""

import json


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
