"""Launch fake trainings on three processes, one after another: run_fake.py FOLDER NAME...

Each starts with a line on stderr that holds its name; what is said of its failure follows. On
stdout it leaves one JSON line: its name, exit status, what rank 0 returned, seconds.
"""

import json
import sys
import time

import fake_training

from pith.cli.output import failure_text
from pith.errors import PithError
from pith.launch.elastic import launch
from pith.run.job import Job


def main(folder: str, names: list[str]) -> None:
    for name in names:
        print(f"== {name}", file=sys.stderr, flush=True)
        timeout_s = 3.0 if name.startswith("stopped") else 60.0
        job = Job("", name, f"{folder}/{name}", "cpu", "gloo", timeout_s)
        status, summary, start = 0, None, time.monotonic()
        try:
            summary = launch(getattr(fake_training, name), job, num_ranks=3)
        except PithError as error:
            print(failure_text(error, debug=False), file=sys.stderr)
            status = error.exit_status
        except KeyboardInterrupt:
            status = 130
        seconds = time.monotonic() - start
        line = {"name": name, "status": status, "summary": summary, "seconds": seconds}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
