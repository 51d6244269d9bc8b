"""One of two processes, of which the first works alone for longer than their communication waits."""

import json
from datetime import timedelta
from functools import partial
from time import sleep

import accelerate  # noqa: F401  its import takes longer than the wait
import torch.distributed as dist

from phasewise.train.processes import join, leave

if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    try:
        join("cpu").once(partial(sleep, 4))
        print(json.dumps("waited"))
    finally:
        leave()
