"""`tcore demo`: the page in the browser."""

import signal
import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from tcore.cli.parsing import check_flags, parse
from tcore.errors import InputError

QUICKSTART = Path("runs/quickstart")


@dataclass(frozen=True)
class DemoCommand:
    """Paint objects on a frame in the browser and watch them propagate through the video."""

    encoder: Positional[str] = ""
    """A run folder, a checkpoint, timm:NAME ... (default: what came with tcore, or runs/quickstart)."""
    host: str = "127.0.0.1"
    """Address to listen on; others than 127.0.0.1 let other machines in."""
    port: int = 7860
    """Port to listen on; 0 takes any that is free."""
    max_upload_mb: int = 200
    """Size of an uploaded video, at most."""
    max_frames: int = 240
    """Frames of an uploaded video that are used, at most."""
    max_visitors: int = 8
    """Visitors at a time; the longest idle one makes room for the next."""
    browser: bool = True
    """Open the page in the browser."""


def usual_encoder() -> str:
    """The encoder where none is named: the shipped one, the quickstart's, or an empty string."""
    from tcore.evaluation.encoders import DEFAULT, shipped

    if shipped().weights.is_file():
        return DEFAULT
    return str(QUICKSTART) if (QUICKSTART / "encoder.safetensors").is_file() else ""


def demo_verb(argv: list[str]) -> None:
    """`tcore demo`: serve the page until Ctrl-C."""
    check_flags(argv, "tcore demo", DemoCommand())
    command = parse(DemoCommand, argv, "tcore demo", DemoCommand())
    if not 0 <= command.port <= 65535:
        raise InputError(f"--port {command.port}: need 0 to 65535.")
    for name in ("max_upload_mb", "max_frames", "max_visitors"):
        if getattr(command, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(command, name)}: need 1 or more.")
    from tcore.demo.engine import load_engine

    try:
        from tcore.demo.server import Demo, Limits
    except ImportError as error:
        raise InputError(f"tcore demo needs {error.name}: pip install starlette uvicorn.") from error
    spec = command.encoder or usual_encoder()
    if not spec:
        raise InputError(
            f"no encoder: name one (tcore demo ENCODER), or train one: tcore quickstart --run {QUICKSTART}."
        )
    engine = load_engine(spec)
    limits = Limits(command.max_upload_mb, command.max_frames, command.max_visitors)
    demo = Demo(engine, host=command.host, port=command.port, limits=limits)
    print(f"encoder: {engine.encoder.name}")
    print(f"page: {demo.url} (Ctrl-C stops)", flush=True)
    if command.browser and not webbrowser.open(demo.url):
        print("no browser could be opened: open the address above.", file=sys.stderr)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # removes the temporary folder, too
    try:
        demo.serve()
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr)
