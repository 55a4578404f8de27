"""Rendered frames per second on one core: `python benchmarks/synthetic.py`."""

import time

from tcore.data.rendered import render_video


def main() -> None:
    for size in (128, 256):
        render_video(0, 0, size=size)
        started, videos = time.perf_counter(), 40 if size == 128 else 10
        for index in range(videos):
            render_video(1, index, size=size)
        seconds = time.perf_counter() - started
        print(f"{size} px: {videos * 20 / seconds:.0f} frames/s on one core (wanted at 128 px: 300)")


if __name__ == "__main__":
    main()
