"""Does the default call help? Many task and network pairs, each method beside the network and temperature scaling.

`python -m benchmarks.quality --help`, or in Python:

    from benchmarks.quality import load_task
    task = load_task("mnist2k_mlp", seed=0)
    la = aftermap.fit(task.model, task.likelihood, task.train, task.validation(300, 0), **task.task.options())
"""

from benchmarks.quality.tasks import TASKS, Task
from benchmarks.quality.training import Prepared, load_task

__all__ = ["TASKS", "Prepared", "Task", "load_task"]
