"""A model of your own in Python, behind sconce's queue.

A pool with `model = "python:MODULE:CLASS"` has a process for each worker, which imports the module, loads the model, and computes
the batches that the worker forms. `testing.run` does the same without a worker.
"""

from ._class import load
from ._errors import ClassProblem, TaskError
from ._model import Body, Input, Model, Output, Task, Worker, one_pass

__all__ = ["Body", "ClassProblem", "Input", "Model", "Output", "Task", "TaskError", "Worker", "load", "one_pass"]
