"""How the program is run: its commands, files of texts, and what it answers."""

import array
import base64
import json
import os
import subprocess
import sys
from pathlib import Path

from .findings import NotMeasured

LONGEST = 300
"""Seconds that a command may take."""


class Ended:
    """A command that has ended."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    def report(self):
        """The JSON that it printed."""
        return json.loads(self.out)

    def last_words(self):
        """The last line that it wrote to its user."""
        lines = self.err.strip().splitlines()
        return lines[-1][:250] if lines else "(silent)"


class Sconce:
    """The program at `path`. Files go to `folder`, what it says to `log`."""

    def __init__(self, path, folder, log, settings=()):
        self.path, self.folder, self.log = Path(path).resolve(), folder, log
        self.settings = list(settings)
        self.number = 0

    def environment(self, **more):
        """Ours, without what would be settings."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("SCONCE_")}
        own.pop("AMQP_URL", None)
        own["TMPDIR"] = str(self.folder)
        own.update(more)
        return own

    def start(self, *arguments, program=None, stdin=subprocess.DEVNULL, **more):
        """Starts a command. `more` goes into its environment."""
        command = [str(it) for it in (program or self.path, *arguments)]
        self.log.write(f"$ {' '.join(command)}\n")
        self.log.flush()
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=self.environment(**more), text=True, **pipes)

    def end(self, process):
        """Waits for its end; kills it when that takes too long."""
        try:
            out, err = process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += f"\ngpu-check: killed after {LONGEST} s\n"
        self.log.write(err)
        self.log.flush()
        return Ended(process.returncode, out, err)

    def run(self, *arguments, **more):
        """Runs a command to its end."""
        return self.end(self.start(*arguments, **more))

    def devices(self, settings=()):
        """`sconce devices --json`."""
        return self.run("devices", "--json", *_set(settings))

    def arguments(self, lines, model, device, settings):
        """Of `run-batch`, over a file that is written here; returns them with the output's path."""
        self.number += 1
        given, made = self.folder / f"in-{self.number}.jsonl", self.folder / f"out-{self.number}.jsonl"
        write(given, lines)
        command = ["run-batch", "-i", given, "-o", made, "--json", "--model", model, "--devices", device]
        return [*command, *_set([*self.settings, *settings])], made

    def embed(self, lines, model, device, settings=(), **more):
        """Runs `lines` (texts, or request bodies) through `run-batch`: its end, and the answers in their
        order."""
        arguments, made = self.arguments(lines, model, device, settings)
        ended = self.run(*arguments, **more)
        return ended, list(answers(made))

    def forget(self):
        """Removes the files of all runs so far."""
        for path in self.folder.glob("*.jsonl"):
            path.unlink()


def _set(settings):
    return [word for setting in settings for word in ("--set", setting)]


def write(path, lines):
    """A file for `run-batch`."""
    with open(path, "w", encoding="utf-8") as file:
        for number, line in enumerate(lines):
            body = line if isinstance(line, dict) else {"input": line, "encoding_format": "base64"}
            request = {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": body}
            file.write(json.dumps(request) + "\n")


def answers(path):
    """The responses of a file that `run-batch` wrote; none while there is none."""
    if path.exists():
        with open(path, encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)["response"]


def vectors(responses):
    """The vectors of responses of one text each, and how many tokens these had."""
    found, tokens = [], []
    for response in responses:
        if response["status_code"] != 200:
            raise ValueError(
                f"an answer with status {response['status_code']}: {str(response['body'])[:300]}"
            )
        numbers = array.array("f")
        numbers.frombytes(base64.b64decode(response["body"]["data"][0]["embedding"]))
        if sys.byteorder == "big":
            numbers.byteswap()
        found.append(numbers.tolist())
        tokens.append(response["body"]["usage"]["prompt_tokens"])
    return found, tokens


def ended_well(ended):
    """Raises where a command did not."""
    if ended.code != 0:
        raise RuntimeError(f"exit {ended.code}: {ended.last_words()}")
    return ended


def workers(launcher):
    """Process ids of a launcher's workers: among its children is a guard too."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            arguments = path.with_name("cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(fields[1]) == launcher and fields[0] not in "ZX" and arguments[1:2] == [b"worker"]:
            found.append(int(path.parent.name))
    return found


def is_linux():
    """Raises where there is no /proc to look into."""
    if not Path("/proc/self/maps").exists():
        raise NotMeasured("no /proc here")
