"""Shows that each worker has a model of its own, in a process of its own, on a device of its own, and inherits nothing.

    python verify_workers.py SCONCE DEVICE...      such as: verify_workers.py sconce cpu cpu
                                                   or:      verify_workers.py sconce cuda:0 cuda:1

Runs `sconce run-batch` with one worker on each device and the class below. The class answers what its process sees, and this
program checks the answers. If PyTorch is installed, the class asks it for random weights and for the GPU; otherwise it asks
Python's `random` and the environment.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import sconce_model
from sconce_model import Input, Model, Task

try:
    import torch
except ImportError:
    torch = None

STATE: list[str] = []
"""Set by `main` below, not by the class. A process that was forked from this program would see what is in it."""


class Witness(Model):
    urls = ("/classify",)

    def load(self, device: str, dtype: str, options: Any) -> None:
        # With the same seed, all workers would draw the same weights.
        random.seed(self.worker.seed)
        cards = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.seen = {"process": os.getpid(), "slot": self.worker.slot, "device": device, "cards": cards, "state": STATE}
        self.seen["environment"] = "PARENTS_VARIABLE" in os.environ
        if torch:
            torch.manual_seed(self.worker.seed)
            weights = torch.randn(3, device=device)
            self.seen |= {"device": str(weights.device), "seen cards": torch.cuda.device_count()}
            self.weights = weights.tolist()
        else:
            self.weights = [random.gauss(0, 1) for _ in range(3)]

    def forward(self, batch: list[Input]) -> Any:
        time.sleep(0.05)  # so that every worker gets some of the tasks
        return [{**self.seen, "weights": self.weights, "computed by": os.getpid()} for _ in batch]

    def finish(self, task: Task, outputs: list[Any]) -> Any:
        return outputs[0]


def main(program: str, devices: list[str]) -> None:
    STATE.append("set by the parent")
    os.environ["PARENTS_VARIABLE"] = "set by the parent"
    with tempfile.TemporaryDirectory() as folder:
        tasks, answers = Path(folder, "tasks.jsonl"), Path(folder, "answers.jsonl")
        line = {"method": "POST", "url": "/classify", "body": {"input": "who are you?"}}
        tasks.write_text("".join(json.dumps({"custom_id": str(number), **line}) + "\n" for number in range(40 * len(devices))))
        model = ["--model", f"python:{Path(__file__).resolve()}:Witness", "--devices", ",".join(devices)]
        path = json.dumps([str(Path(sconce_model.__file__).parents[1])])
        settings = [f"python.executable={sys.executable}", f"python.path={path}", "batch.max_tokens=12"]
        flags = [word for setting in settings for word in ("--set", f"pool[0].{setting}")]
        subprocess.run([program, "run-batch", "-i", tasks, "-o", answers, *model, *flags], check=True)
        every = [json.loads(line)["response"]["body"] for line in answers.read_text().splitlines()]
    seen = {answer["process"]: answer for answer in every}
    for one in seen.values():
        print(json.dumps(one))
    cards = [device for device in devices if device.startswith("cuda")]
    checks = {
        "as many processes as devices": len(seen) == len(devices),
        "none is this one": os.getpid() not in seen,
        "each computes in the process that loaded": all(it["computed by"] == it["process"] for it in every),
        "each has a slot and weights of its own": all(
            len({str(it[name]) for it in seen.values()}) == len(devices) for name in ("slot", "weights")
        ),
        "each has its own card, and sees no other": all("," not in (it["cards"] or "") for it in seen.values())
        and len({it["cards"] for it in seen.values() if it["cards"]}) == len(set(cards)),
        "no state or environment of this program": not any(it["state"] or it["environment"] for it in seen.values()),
    }
    print(*(f"{'yes' if holds else 'NO'}: {what}" for what, holds in checks.items()), sep="\n")
    sys.exit(not all(checks.values()))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: verify_workers.py SCONCE DEVICE...")
    main(sys.argv[1], sys.argv[2:])
