"""Runs a real Prometheus over made-up metrics: does every query of the dashboard parse and find something, and does
every alert's text come out whole?

The metrics are made from the lists of docs/monitoring.md, with every label and value that stands there; so a query that
asks for another name, label or value finds nothing. One made-up host is well and the others are ill, so that alerts
come up; their `for` is not waited for, since the texts are there while an alert is pending.
"""

import http.server
import itertools
import json
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

SECONDS = 16
BUCKETS = [0.001, 0.01, 0.1, 1, 10, 100, 1000]
# Not to be had within seconds: one wants hours of memory's growth, one that there is no target.
QUIET = {"SconceWorkerMemoryGrows", "SconceAbsent"}
# What must come out of all jobs together: other services, RabbitMQ among them, are in the same Prometheus.
VALUES = {"Hosts": "2"}
START = time.time()


def tables():
    """Name → (type, labels), and (name, label) → values."""
    metrics, values = {}, {}
    for line in pathlib.Path("docs/monitoring.md").read_text().splitlines():
        if found := re.match(r"- (`sconce_.*?) \((\w+); (.*?)\): ", line):
            labels = re.findall(r"`([^`]*)`", found[3])
            metrics.update({name: (found[2], labels) for name in re.findall(r"`([^`]*)`", found[1])})
        elif found := re.match(r"- `(\w+)` of `(sconce_\w+)`: (.*)", line):
            values[found[2], found[1]] = [""] * found[3].startswith("empty") + re.findall(r"`([^`]*)`", found[3])
    return metrics, values


def series(name, labels, value):
    inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {value}\n"


def healthy(metrics, values):
    """Everything there is, of a host that works."""
    text, age = "", time.time() - START
    own = {"pool": ["embed"], "slot": ["embed/0", "embed/1"], "device": ["GPU-1"], "version": ["0.0.0"]}
    own |= {"launcher": ["host"], "model": ["m"], "queue": ["sconce.tasks"], "user": ["", "u"], "dtype": ["f32"]}
    for name, (kind, labels) in metrics.items():
        choices = [values.get((name, label)) or own[label] for label in labels]
        for chosen in itertools.product(*choices):
            given = dict(zip(labels, chosen))
            if kind == "histogram":
                count = int(100 * age)
                for bound in [*BUCKETS, "+Inf"]:
                    text += series(f"{name}_bucket", {**given, "le": bound}, count if bound == "+Inf" or bound >= 1 else count // 2)
                text += series(f"{name}_count", given, count) + series(f"{name}_sum", given, 0.5 * count)
            elif kind == "counter":
                text += series(name, given, 0.5 * age if "busy" in name else int(10 * age))
            elif name == "sconce_worker_state":
                text += series(name, given, int(given["state"] == "busy"))
            elif name == "sconce_worker_stuck":
                text += series(name, given, 0)
            else:
                text += series(name, given, 1)
    for number, metric in enumerate(("messages_ready", "messages_unacked", "consumers")):
        text += series(f"rabbitmq_queue_{metric}", {"queue": "sconce.tasks", "vhost": "/"}, number + 1)
    return text


def ill(_metrics, _values):
    """What each alert is there for."""
    age = int(time.time() - START)
    text = ""
    text += series("sconce_build_info", {"version": "0.0.0"}, 1)
    for pool, state in (("stuck", "paused"), ("lost", "loading"), ("given-up", "quarantined")):
        ready = int(pool == "lost")
        text += series("sconce_worker_state", {"pool": pool, "slot": f"{pool}/0", "state": state}, int(pool == "given-up"))
        text += series("sconce_worker_state", {"pool": pool, "slot": f"{pool}/0", "state": "ready"}, ready)
    slot = {"pool": "stuck", "slot": "stuck/0"}
    gauges = (("in_flight_tasks", 8), ("prefetched_tasks", 20), ("worker_stuck", 1), ("batch_duration_seconds_count", 7))
    for name, value in gauges:
        text += series(f"sconce_{name}", slot, value)
    text += series("sconce_broker_connected", {"pool": "lost", "slot": "lost/0"}, 0)
    for reason in ("stuck", "killed"):
        text += series("sconce_worker_restarts_total", {**slot, "reason": reason}, age)
    text += series("sconce_dead_lettered_total", {**slot, "reason": "poison"}, age)
    text += series("sconce_reloads_total", {"result": "refused"}, age)
    # A rate over minutes, of seconds of it: what is busy must be so a hundred times.
    for pool, busy in (("busy", 1), ("idle", 0)):
        slot = {"pool": pool, "slot": f"{pool}/0"}
        for status in ("failed", "rejected", "expired"):
            text += series("sconce_tasks_total", {**slot, "status": status, "reason": status}, 10 * age)
        text += series("sconce_task_stage_duration_seconds_sum", {**slot, "stage": "queue"}, 900 * age)
        text += series("sconce_task_stage_duration_seconds_count", {**slot, "stage": "queue"}, 10 * age)
        text += series("sconce_device_busy_seconds_total", slot, 100 * busy * age)
        text += series("sconce_tasks_total", {**slot, "status": "cancelled", "reason": "cancelled"}, 12 * age)
        for name in ("first_token", "output_token"):
            text += series(f"sconce_{name}_duration_seconds_sum", slot, 900 * age)
            text += series(f"sconce_{name}_duration_seconds_count", slot, 10 * age)
    for name in ("reserved_tokens", "tokens"):
        text += series(f"sconce_kv_{name}", {"pool": "stuck", "slot": "stuck/0"}, 100)
    for name, value in (("used", 99), ("total", 100)):
        text += series(f"sconce_device_memory_{name}_bytes", {"device": "GPU-2"}, value)
    text += series("rabbitmq_queue_messages_ready", {"queue": "sconce.other"}, 12)
    return text + series("rabbitmq_queue_consumers", {"queue": "sconce.other"}, 0)


def other(_metrics, _values):
    """A service that Prometheus scrapes too, and that is none of ours."""
    return series("process_start_time_seconds", {}, START)


def serve(make, tables_read):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(make(*tables_read).encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def ask(port, path, **parameters):
    address = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters, doseq=True)}"
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)


def substituted(expression):
    expression = expression.replace("$__rate_interval", "8s")
    return re.sub(r"\$(job|instance|pool|slot|queue)\b", ".*", expression)


def queries(dashboard):
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for annotation in dashboard["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]


def check_queries(port, dashboard):
    problems, count = [], 0
    for title, expression in queries(dashboard):
        count += 1
        answer = ask(port, "query", query=substituted(expression))
        if answer["status"] != "success":
            problems.append(f"{title}: {answer['error']}")
        elif not answer["data"]["result"]:
            problems.append(f"{title}: finds nothing: {expression}")
        elif title in VALUES and [it["value"][1] for it in answer["data"]["result"]] != [VALUES[title]]:
            problems.append(f"{title}: {answer['data']['result']}, and not {VALUES[title]}")
    for variable in dashboard["templating"]["list"]:
        if variable["type"] != "query":
            continue
        count += 1
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
        answer = ask(port, f"label/{found[2]}/values", **{"match[]": substituted(found[1])})
        if not answer.get("data"):
            problems.append(f"variable {variable['name']}: {answer}")
    print(f"  {count} queries of the dashboard, {len(problems)} problems")
    return problems


def check_alerts(port):
    problems, raised = [], set()
    rules = [rule for group in ask(port, "rules")["data"]["groups"] for rule in group["rules"]]
    for rule in rules:
        if rule["health"] != "ok":
            problems.append(f"{rule['name']}: {rule.get('lastError', rule['health'])}")
        for alert in rule["alerts"]:
            raised.add(rule["name"])
            for text in alert["annotations"].values():
                if "<no value>" in text or "rror expanding" in text:
                    problems.append(f"{rule['name']}: {text}")
    silent = {rule["name"] for rule in rules} - raised
    problems += [f"{name}: did not come up" for name in sorted(silent - QUIET)]
    problems += [f"{name}: came up" for name in sorted(QUIET & raised)]
    print(f"  {len(rules)} alerts, {len(raised)} came up with whole texts, {len(problems)} problems")
    return problems


def main(folder):
    folder = pathlib.Path(folder)
    folder.mkdir()
    read = tables()
    # The last one is a host that is down.
    targets = [f"127.0.0.1:{number}" for number in (serve(healthy, read), serve(ill, read), free_port())]
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(pathlib.Path("deploy/prometheus/alerts.yml").resolve())],
        "scrape_configs": [
            {"job_name": "sconce", "static_configs": [{"targets": targets}]},
            {"job_name": "other", "static_configs": [{"targets": [f"127.0.0.1:{serve(other, read)}"]}]},
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    port = free_port()
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        time.sleep(SECONDS)
        if server.poll() is not None:
            print((folder / "log").read_text())
            return 1
        problems = check_queries(port, json.load(open("deploy/grafana/sconce.json"))) + check_alerts(port)
    finally:
        server.terminate()
        server.wait()
    for problem in problems:
        print(f"  {problem}")
    print(f"  {len(read[0])} metrics of docs/monitoring.md")
    return bool(problems)


sys.exit(main(sys.argv[1]))
