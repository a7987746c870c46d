"""`pith tokenize`: text files become a corpus folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pith.cli.output import emit
from pith.report import Report

if TYPE_CHECKING:
    from pith.data.tokenize import Progress, Tokenized


class OnBadLine(StrEnum):
    """What a line that cannot be understood does to the run."""

    STOP = "stop"
    SKIP = "skip"


def tokenize_command(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Files (.jsonl .jsonl.gz .jsonl.zst .parquet .txt), or folders of such files.",
        ),
    ],
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The corpus folder to make.")],
    tokenizer: Annotated[
        str, typer.Option(metavar="FILE|bytes", help="A tokenizer.json, or the built-in bytes.")
    ] = "bytes",
    eod: Annotated[
        str | None, typer.Option(metavar="NAME", help="The token that ends a document.")
    ] = None,
    text_key: Annotated[
        str, typer.Option(metavar="KEY", help="The JSON key or column that holds the text.")
    ] = "text",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; by default one for each core.")
    ] = None,
    on_bad_line: Annotated[
        OnBadLine, typer.Option(help="Whether a bad line stops the run.")
    ] = OnBadLine.STOP,
    max_bad_lines: Annotated[
        int, typer.Option(min=0, help="How many bad lines may be skipped.")
    ] = 100,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Turn text into a corpus folder that `pith train` reads."""
    from pith.data.tokenize import tokenize  # noqa: PLC0415  keeps `pith --help` instant

    with _progress_line() as on_progress:
        done = tokenize(
            inputs,
            out=out,
            tokenizer=tokenizer,
            end_token=eod,
            text_key=text_key,
            workers=workers,
            max_bad_lines=max_bad_lines if on_bad_line is OnBadLine.SKIP else 0,
            on_progress=on_progress,
        )
    data = {
        "path": str(done.path),
        "documents_in": done.documents_in,
        "documents_out": done.documents_out,
        "rejected": done.num_empty + done.num_bad,
        "rejected_empty": done.num_empty,
        "rejected_bad": done.num_bad,
        "rejections": list(done.rejected),
        "tokens": done.num_tokens,
        "files": list(done.files),
        "records_reused": done.records_reused,
    }
    report = Report(verb="tokenize", data=data, next=(f"pith train --set data.corpus={out}",))
    emit(report, json=json, out=None, text=_text(done))


def _text(done: "Tokenized") -> str:
    lines = [
        f"{done.documents_in:,} documents in = {done.documents_out:,} out"
        f" + {done.num_empty:,} empty + {done.num_bad:,} bad",
        f"{done.num_tokens:,} tokens in {done.path}",
    ]
    lines += [f"left out {entry['where']}: {entry['reason']}" for entry in done.rejected]
    if done.num_empty + done.num_bad > len(done.rejected):
        lines.append(f"all that was left out: {done.path / 'rejected.jsonl'}")
    if done.records_reused:
        lines.append(f"{done.records_reused:,} records were done by an earlier run")
    return "\n".join(lines)


@contextmanager
def _progress_line() -> "Iterator[Callable[[Progress], None]]":
    """Shows on a terminal how far the run is, and nothing elsewhere."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress as Bar  # noqa: PLC0415
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("tokenizing", total=None)

        def show(progress: "Progress") -> None:
            described = f"{progress.records:,} documents, {progress.num_tokens:,} tokens"
            bar.update(task, description=described)

        yield show
