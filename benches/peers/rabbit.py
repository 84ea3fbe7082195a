"""A RabbitMQ node of our own: Debian's server with its own settings, on ports and in a folder of its own."""

import errno
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

BIN = Path("/usr/lib/rabbitmq/bin")
"""The scripts that do not switch the user."""

# Ends the node when our end of its stdin is gone, in whatever way we end.
KEEPER = """
"$0"/rabbitmq-server >"$FOLDER/out" 2>&1 </dev/null & node=$!
read line
kill -9 $node
wait $node 2>/dev/null
rm -rf "$FOLDER"
"""


PORTS = range(10_000, 30_000)
"""Below those that the system gives to connections: it would give one away before the node listens."""


def free_ports(count):
    """Ports that nobody uses, all different because they are held together."""
    held = []
    while len(held) < count:
        try:
            held.append(socket.create_server(("127.0.0.1", random.choice(PORTS))))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    ports = [it.getsockname()[1] for it in held]
    for it in held:
        it.close()
    return ports


class Rabbit:
    """Runs within a `with`, on the given cores; `url` is its address."""

    def __init__(self, cores):
        self.cores = cores

    def __enter__(self):
        port, distribution = free_ports(2)
        self.url = f"amqp://guest:guest@127.0.0.1:{port}/%2f"
        self.folder = Path(tempfile.mkdtemp(prefix="sconce-bench-rabbit-"))
        node = f"sconce-bench-{os.getpid()}-{port}@localhost"
        environment = {
            "HOME": self.folder,
            "FOLDER": self.folder,
            "RABBITMQ_NODENAME": node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": port,
            "RABBITMQ_DIST_PORT": distribution,
            "RABBITMQ_MNESIA_BASE": self.folder / "data",
            "RABBITMQ_LOG_BASE": self.folder / "log",
            "RABBITMQ_CONFIG_FILE": self.folder / "rabbitmq",
            "RABBITMQ_ENABLED_PLUGINS_FILE": self.folder / "plugins",
            "RABBITMQ_PID_FILE": self.folder / "pid",
            # The node replaces its start script, so that the keeper's `$!` is the node.
            "RABBITMQ_ALLOW_INPUT": "true",
            "RABBITMQ_SERVER_START_ARGS": "-noinput",
        }
        environment = {**os.environ, **{name: str(value) for name, value in environment.items()}}
        self.keeper = subprocess.Popen(
            ["sh", "-c", KEEPER, str(BIN)],
            env=environment,
            stdin=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, self.cores),
        )
        self._wait(port)
        return self

    def _wait(self, port):
        for _ in range(600):
            try:
                with socket.create_connection(("127.0.0.1", port), 1) as connection:
                    connection.sendall(b"AMQP\x00\x00\x09\x01")
                    if connection.recv(1):
                        return
            except OSError:
                time.sleep(0.1)
        said = (self.folder / "out").read_text(errors="replace")
        raise SystemExit(f"RabbitMQ does not start:\n{said}")

    def __exit__(self, *_):
        self.keeper.stdin.close()
        self.keeper.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
