"""What was found of each promise: PASS, FAIL, or not measured and why. Nothing passes without evidence."""

import traceback
from contextlib import contextmanager

PASS, FAIL, NOT_MEASURED = "PASS", "FAIL", "not measured"


class NotMeasured(Exception):
    """This cannot be shown here; says why."""


class Findings:
    """In the order in which they were made; each is printed at once."""

    def __init__(self, log):
        self.rows = []
        self.log = log

    def check(self, promise, evidence):
        """Calls `evidence`, which returns whether the promise was kept and by what that is seen. What it
        stumbles over is a failure too."""
        try:
            kept, seen = evidence()
            self.add(promise, PASS if kept else FAIL, seen)
        except NotMeasured as reason:
            self.add(promise, NOT_MEASURED, str(reason))
        except Exception as error:
            traceback.print_exc(file=self.log)
            self.log.flush()
            self.add(promise, FAIL, f"{type(error).__name__}: {error}")

    @contextmanager
    def tolerated(self):
        """What goes wrong within this is in the log, and nowhere else."""
        try:
            yield
        except Exception:
            traceback.print_exc(file=self.log)
            self.log.flush()

    def add(self, promise, status, evidence):
        """Notes and prints it."""
        evidence = " ".join(str(evidence).split())
        self.rows.append({"promise": promise, "status": status, "evidence": evidence})
        print(f"{status:<12}  {promise}: {evidence}", flush=True)

    def count(self, status):
        """How many of them."""
        return sum(row["status"] == status for row in self.rows)
