"""The verbs for people to look at: report, demo."""

import signal
import webbrowser
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from tcore.cli.parsing import at_least
from tcore.errors import InputError
from tcore.text import to_stderr


@dataclass(frozen=True)
class Report:
    """Write one file about some runs: settings, curves, scores beside published ones, figures, cost."""

    runs: Positional[tuple[Path, ...]]
    """Run folders, or folders of tcore evaluate --out."""
    out: Path
    """HTML (one self-contained file) or Markdown to write."""
    draw: bool = True
    """Draw figures that a run lacks, or that are older than its encoder, into RUN/figures."""

    def execute(self) -> None:
        """Write the report."""
        from tcore.show.report import write_report

        write_report(self.runs, self.out, draw=self.draw, say=to_stderr)
        print(f"report: {self.out}")


@dataclass(frozen=True)
class Demo:
    """Paint objects on a frame in the browser and watch them being propagated through the video."""

    encoder: Positional[str] = "default"
    """A run folder, a checkpoint, timm:NAME ...; default comes with tcore."""
    host: str = "127.0.0.1"
    """Address to listen on; others than 127.0.0.1 let other machines in."""
    port: int = 7860
    """Port to listen on; 0 takes any that is free."""
    max_upload_mb: int = 200
    """Largest video that may be uploaded, in MB."""
    max_frames: int = 240
    """Frames of an uploaded video that are used, at most."""
    max_visitors: int = 8
    """Visitors at a time; a new one replaces the one who was away longest."""
    browser: bool = True
    """Open the page in the browser."""

    def execute(self) -> None:
        """Serve the page until Ctrl-C."""
        if not 0 <= self.port <= 65535:
            raise InputError(f"--port {self.port}: need 0 to 65535.")
        limits = (self.max_upload_mb, self.max_frames, self.max_visitors)
        at_least(1, max_upload_mb=limits[0], max_frames=limits[1], max_visitors=limits[2])
        from tcore.demo.engine import load_engine

        try:
            from tcore.demo.server import Demo as Server
            from tcore.demo.server import Limits
        except ImportError as error:
            raise InputError(f"tcore demo needs {error.name}: pip install starlette uvicorn.") from error
        engine = load_engine(self.encoder)
        demo = Server(engine, Limits(*limits), self.host, self.port)
        print(f"encoder: {engine.encoder.name}")
        print(f"page: {demo.url} (Ctrl-C stops)", flush=True)
        if self.browser and not webbrowser.open(demo.url):
            to_stderr("no browser could be opened: open the address above.")
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # removes the temporary folder, too
        try:
            demo.serve()
        except KeyboardInterrupt:
            to_stderr("stopped.")
