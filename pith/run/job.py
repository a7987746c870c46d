"""What a rank is asked to do. Plain values, so that it travels to other processes."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pith.errors import Fault, RequestError

Device = Literal["cpu", "cuda"]
Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Job:
    """One training run, as every rank of it sees it."""

    recipe_toml: str  # resolved: loads anywhere
    recipe_name: str
    run_dir: str
    device: Device = "cpu"
    backend: Backend = "gloo"
    timeout_s: float = 600.0  # of one collective
    debug: bool = False  # pipeline messages carry checked headers; errors show tracebacks
    fault: str | None = None  # for tests: see InjectedFault
    run_id: str = ""  # of the run folder: who owns the checkpoints
    checkpoint: str | None = None  # the folder to resume from; None: from initial weights

    @property
    def failures_dir(self) -> Path:
        """Where failing ranks leave word for the parent."""
        return Path(self.run_dir) / "failures"

    def progress_path(self, rank: int) -> Path:
        """Where `rank` notes how far it is."""
        return self.failures_dir / f"progress-{rank}"


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault that a test orders at a site, on a rank, in a step: `raise`, `kill` (this rank),
    `hang`, or `delay` by a few seconds, as a slow disk would.

    Text form ACTION:SITE:RANK:STEP, such as raise:backward:1:3. Steps count from 1.
    """

    action: str
    site: str
    rank: int
    step: int

    ACTIONS: ClassVar[tuple[str, ...]] = ("raise", "kill", "hang", "delay")
    SITES: ClassVar[tuple[str, ...]] = (
        "data",
        "gather",
        "forward",
        "backward",
        "route",
        "dispatch",
        "combine",
        "combine-backward",
        "dispatch-backward",
        "reduce",
        "optimizer",
        "validation",
        "stage",  # of a checkpoint: its copy, its files, its manifest and rename, what is retired
        "write",
        "commit",
        "retire",
    )

    @classmethod
    def parse(cls, text: str) -> "InjectedFault":
        """Raises RequestError where `text` has not this form."""
        action, site, rank, step = (*text.split(":"), "", "", "", "")[:4]
        if (
            action not in cls.ACTIONS
            or site not in cls.SITES
            or not rank.isdecimal()
            or not step.isdecimal()
        ):
            raise RequestError(
                "fault.invalid",
                what="no such fault can be injected",
                found=text,
                wanted=f"{'|'.join(cls.ACTIONS)}:{'|'.join(cls.SITES)}:RANK:STEP",
                where="--inject-fault",
                faults=(Fault("--inject-fault", text, "ACTION:SITE:RANK:STEP"),),
            )
        return cls(action, site, int(rank), int(step))
