"""The command line with a fake training as a rank of an outer job: run_joined.py FAKE.

The status with which each rank leaves stands in a file status-RANK: the outer launcher tells only
that of the first.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import fake_training
import typer

from pith.cli import app
from pith.launch import worker
from pith.run.job import Job


def train_command(fake: str, *, json: Annotated[bool, typer.Option("--json")] = False) -> None:
    worker.join(getattr(fake_training, fake), Job("", fake, str(Path.cwd())), begin=lambda job: job)


def main(fake: str) -> None:
    leave = os._exit

    def tell_and_leave(status: int) -> NoReturn:
        Path(f"status-{os.environ['RANK']}").write_text(str(status))
        leave(status)

    os._exit = tell_and_leave
    app.train_command = train_command
    sys.argv[1:] = ["train", fake, "--json"]
    app.main()


if __name__ == "__main__":
    main(sys.argv[1])
