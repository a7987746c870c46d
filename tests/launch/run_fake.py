"""Launch one of the fake trainings on three processes: run_fake.py NAME RUN_DIR TIMEOUT_S.

Prints what rank 0 returned, and how long the launch took without the imports.
"""

import json
import sys
import time

import fake_training

from pith.cli.output import failure_text
from pith.errors import PithError
from pith.launch.elastic import launch
from pith.run.job import Job

if __name__ == "__main__":
    name, run_dir, timeout_s = sys.argv[1:]
    job = Job("", name, run_dir, "cpu", "gloo", float(timeout_s))
    status, summary, start = 0, None, time.monotonic()
    try:
        summary = launch(getattr(fake_training, name), job, num_ranks=3)
    except PithError as error:
        print(failure_text(error, debug=False), file=sys.stderr)
        status = error.exit_status
    print(json.dumps({"summary": summary, "seconds": time.monotonic() - start}))
    sys.exit(status)
