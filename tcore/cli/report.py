"""`tcore report`: runs side by side in one file."""

import sys
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from tcore.cli.parsing import check_flags, need_out, parse


@dataclass(frozen=True)
class ReportCommand:
    """Write one file about some runs: settings, curves, scores beside published ones, figures, cost."""

    runs: Positional[tuple[Path, ...]] = ()
    """Run folders, or folders of tcore evaluate --out."""
    out: Path | None = None
    """HTML (one self-contained file) or Markdown to write."""
    draw: bool = True
    """Draw figures that a run lacks, or that are older than its encoder, into RUN/figures."""


def report_verb(argv: list[str]) -> None:
    """`tcore report`: settings, curves, scores, figures and cost of runs."""
    prog = "tcore report"
    check_flags(argv, prog, ReportCommand())
    command = parse(ReportCommand, argv, prog, ReportCommand())
    out = need_out(command.out, prog)
    from tcore.show.report import write_report

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    write_report(command.runs, out, draw=command.draw, say=say)
    print(f"report: {out}")
